"""Tools for all experiments: a store of runs, sweeps over processes and machines, data sets, plots and the report."""
