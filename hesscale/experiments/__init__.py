"""Everything that exists for the paper's figures: the command line, the run store, benchmarks, and the experiments."""
