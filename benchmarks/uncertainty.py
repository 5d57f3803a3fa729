"""Laplace approximations by laplace-torch with HesScaleGN's diagonal, beside its own backends: quality, and the time of `fit`.

A network is trained without weight decay. Its posterior has a Gauss-Newton or Fisher diagonal plus one prior precision, which is
chosen by the marginal likelihood or by the NLL of validation images, in the same way for all. Predictions are laplace-torch's
linearized ones with the probit approximation (`pred_type="glm"`, `link_approx="probit"`), for all settings at once.

    python benchmarks/uncertainty.py --out results/laplace
    python benchmarks/uncertainty.py --dataset mnist --data DATA --out results/laplace
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))  # from a checkout that is not installed, too

import torch
import torch.nn.functional as F
from laplace import Laplace
from laplace.curvature import AsdlGGN, BackPackEF, BackPackGGN, CurvlinopsEF, CurvlinopsGGN
from records import header, made_by, save
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.utils.data import DataLoader, TensorDataset

from hesscale.experiments.bench.measure import digits, message
from hesscale.experiments.lab.data import DataError, Dataset, load
from hesscale.experiments.lab.markdown import markdown_table
from hesscale.experiments.lab.store import seeded
from hesscale.experiments.vision.problems import three_c_three_d
from hesscale.uses.laplace import HesScaleGN

BACKENDS: dict[str, tuple[type, dict[str, Any]]] = {
    "HesScaleGN": (HesScaleGN, {}),
    "HesScaleGN, calibrated": (HesScaleGN, {"calibrate": True}),
    "Monte-Carlo (ours)": (HesScaleGN, {"method": "ggn_mc_per_sample"}),
    "BackPackGGN (exact)": (BackPackGGN, {}),
    "BackPackGGN, stochastic": (BackPackGGN, {"stochastic": True}),
    "BackPackEF": (BackPackEF, {}),
    "CurvlinopsGGN (exact)": (CurvlinopsGGN, {}),
    "CurvlinopsEF": (CurvlinopsEF, {}),
    "AsdlGGN (exact)": (AsdlGGN, {}),
}
COMPARED = ("HesScaleGN", "HesScaleGN, calibrated", "Monte-Carlo (ours)", "BackPackGGN (exact)", "BackPackEF")
TUNINGS = ("marginal likelihood", "validation")
PRIORS = [10.0 ** (k / 4) for k in range(-8, 25)]  # 0.01 to 1e6
BATCH = 64  # in training and in fit
TIMED_BATCH = 32
LETTERS = 10  # the first class of EMNIST-47 that is not a digit


@dataclass(frozen=True)
class Size:
    """How much of a data set is used, and for how long a network is trained."""

    train: int
    validation: int
    test: int
    epochs: int


SIZES = {"digits": Size(500, 500, 297, 60), "mnist": Size(5000, 1000, 2000, 20)}


@dataclass
class Task:
    train: TensorDataset
    validation: TensorDataset
    test: TensorDataset
    strange: dict[str, Tensor]  # images of none of the classes


def task_of(dataset: Dataset, seed: int, size: Size, root: Path | None) -> Task:
    """Other images for each seed. The last 90° of a turn make what is strange, and letters where they are there."""

    def images(of: Dataset, split: str) -> Tensor:
        return of.images(split).unsqueeze(1).float() / of.scale

    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(dataset.train_labels), generator=generator)
    some, held_out = order[: size.train], order[size.train : size.train + size.validation]
    tested = torch.randperm(len(dataset.test_labels), generator=generator)[: size.test]
    inputs, test = images(dataset, "train"), images(dataset, "test")[tested]
    strange = {"rotated by 90°": test.rot90(1, (2, 3))}
    if dataset.name == "mnist":
        letters = load("emnist47", root)
        where = (letters.test_labels >= LETTERS).nonzero()[:, 0]
        where = where[torch.randperm(len(where), generator=generator)[: size.test]]
        strange["letters (EMNIST-47 subset)"] = images(letters, "test")[where]
    return Task(
        TensorDataset(inputs[some], dataset.train_labels[some]),
        TensorDataset(inputs[held_out], dataset.train_labels[held_out]),
        TensorDataset(test, dataset.test_labels[tested]),
        strange,
    )


def mlp(pixels: int) -> nn.Sequential:
    widths = (pixels**2, 64, 64)
    layers = [module for a, b in itertools.pairwise(widths) for module in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 10))


def cnn(pixels: int) -> nn.Sequential:
    kernel, stride = (5, 2) if pixels == 28 else (3, 1)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, kernel, stride), nn.ReLU(), nn.Conv2d(8, 16, kernel, stride), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


NETWORKS: dict[str, Callable[[int], nn.Sequential]] = {"MLP": mlp, "CNN": cnn}


def trained(network: str, task: Task, seed: int, epochs: int) -> nn.Sequential:
    inputs, labels = task.train.tensors
    with seeded(seed):
        model = NETWORKS[network](inputs.shape[-1])
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(epochs):
            for some in torch.randperm(len(inputs)).split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs[some]), labels[some]).backward()
                optimizer.step()
    return model.eval()


def posterior(model: nn.Module, name: str, weights: str, loader: DataLoader[Any]) -> Any:
    backend, options = BACKENDS[name]
    found = Laplace(copy.deepcopy(model), "classification", weights, "diag", backend=backend, backend_kwargs=dict(options))
    found.fit(loader)
    return found


def squared_jacobians(model: nn.Module, inputs: Tensor, weights: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs, and the squares of their derivatives by all parameters or those of the last layer, some samples at a time."""
    last = f"{len(list(model.children())) - 1}."
    params = {name: p.detach() for name, p in model.named_parameters() if weights == "all" or name.startswith(last)}

    def outputs(values: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        f = functional_call(model, values, (x.unsqueeze(0),)).squeeze(0)
        return f, f

    for some in inputs.split(50):
        jacobians, f = vmap(jacrev(outputs, has_aux=True), (None, 0))(params, some)
        yield f.detach(), torch.cat([j.detach().flatten(2) for j in jacobians.values()], 2).square_()


def predictions(model: nn.Module, inputs: Tensor, weights: str, variances: Tensor) -> Tensor:
    """Probabilities (setting, sample, class) for posterior variances (parameter, setting), with the probit approximation."""
    found = []
    for f, squares in squared_jacobians(model, inputs, weights):
        f_variance = (squares @ variances).movedim(2, 0)
        found.append((f / (1 + torch.pi / 8 * f_variance).sqrt()).softmax(2))
    return torch.cat(found, 1)


def nll(p: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(p.clamp_min(1e-12).log().movedim(2, 1), labels.expand(len(p), -1), reduction="none").mean(1)


def calibration_error(p: Tensor, labels: Tensor, bins: int = 15) -> float:
    """The expected calibration error: the difference between confidence and accuracy, averaged over bins of confidence."""
    confidence, predicted = p.max(1)
    where = (confidence * bins).long().clamp_max(bins - 1)
    gap = (confidence - (predicted == labels).float()).double()
    return float(torch.zeros(bins, dtype=torch.float64).index_add_(0, where, gap).abs().sum() / len(labels))


def scores(p: Tensor, labels: Tensor, strange: dict[str, Tensor]) -> dict[str, float]:
    known = p.max(1).values
    found = {"nll": float(nll(p[None], labels)), "ece": calibration_error(p, labels)}
    found["accuracy"] = float((p.argmax(1) == labels).float().mean())
    for name, other in strange.items():
        unknown = other.max(1).values
        is_known = torch.cat([torch.ones_like(known), torch.zeros_like(unknown)])
        found[f"AUROC, {name}"] = float(roc_auc_score(is_known, torch.cat([known, unknown])))
    return found


def rows_of(model: nn.Module, task: Task, weights: str, seed: int) -> Iterator[dict[str, Any]]:
    """The scores of every backend and tuning, and those of the network by itself."""
    loader = DataLoader(task.train, batch_size=BATCH)
    torch.manual_seed(seed)  # of Monte-Carlo draws
    compared = [name for name in COMPARED if weights == "all" or "calibrated" not in name]  # the last layer's is exact
    posteriors = {name: posterior(model, name, weights, loader) for name in compared}
    inputs, labels = task.validation.tensors
    grid = torch.stack([1 / (found.H + prior) for found in posteriors.values() for prior in PRIORS], 1)
    best = nll(predictions(model, inputs, weights, grid), labels).reshape(len(compared), -1).argmin(1)
    precisions = []
    for found, place in zip(posteriors.values(), best.tolist(), strict=True):
        found.optimize_prior_precision(pred_type="glm", method="marglik", prior_structure="scalar")
        precisions += [float(found.prior_precision), PRIORS[place]]
    settings = [(name, tuning) for name in compared for tuning in TUNINGS]
    variances = [1 / (posteriors[name].H + prior) for (name, _), prior in zip(settings, precisions, strict=True)]
    columns = torch.stack([torch.zeros_like(variances[0]), *variances], 1)
    inputs, labels = task.test.tensors
    known = predictions(model, inputs, weights, columns)
    unknown = {name: predictions(model, images, weights, columns) for name, images in task.strange.items()}
    rows = [("none (MAP)", "", None), *[(*s, prior) for s, prior in zip(settings, precisions, strict=True)]]
    for k, (name, tuning, prior) in enumerate(rows):
        found = scores(known[k], labels, {what: p[k] for what, p in unknown.items()})
        yield {"backend": name, "tuning": tuning, "prior": prior, "scores": {key: digits(value) for key, value in found.items()}}


def shares(model: nn.Module, task: Task) -> list[dict[str, Any]]:
    """Each parameter's sum of the diagonal as a multiple of the exact one's."""
    loader = DataLoader(task.train, batch_size=BATCH)
    sizes = [p.numel() for p in model.parameters()]
    exact = [float(h.sum()) for h in posterior(model, "BackPackGGN (exact)", "all", loader).H.split(sizes)]
    found = []
    for name in COMPARED:
        sums = [float(h.sum()) for h in posterior(model, name, "all", loader).H.split(sizes)]
        ratios = [digits(a / b) for a, b in zip(sums, exact, strict=True)]
        found.append({"backend": name, "parameters": [n for n, _ in model.named_parameters()], "ratios": ratios})
    return found


def timings(batches: int, rounds: int) -> Iterator[dict[str, Any]]:
    """CPU time of `fit`, as a multiple of forward and backward passes over the same batches in the same round."""
    slow = {"CurvlinopsGGN (exact)"}
    cases = [
        ("MLP, 10 classes", mlp(28), (1, 28, 28), 10, TIMED_BATCH, set()),
        ("CNN, 10 classes", cnn(28), (1, 28, 28), 10, TIMED_BATCH, set()),
        ("3C3D, 100 classes", three_c_three_d(activation=nn.ReLU, padding="none"), (3, 32, 32), 100, 8, slow),
    ]
    for title, model, shape, classes, batch, too_large in cases:
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(batches * batch, *shape, generator=generator)
        y = torch.randint(0, classes, (len(x),), generator=generator)
        loader = DataLoader(TensorDataset(x, y), batch_size=batch)
        for weights in ("all", "last_layer"):
            left_out = set(too_large) if weights == "all" else {"CurvlinopsEF", "AsdlGGN (exact)"}
            fits = {name: posterior(model, name, weights, loader) for name in BACKENDS if name not in left_out}
            times: dict[str, list[float]] = {name: [] for name in fits}
            plain = []
            for _ in range(rounds):
                plain.append(cpu_time(gradients, model, loader))
                for name, found in fits.items():
                    times[name].append(cpu_time(found.fit, loader) / plain[-1])
            of_plain = digits(1000 * statistics.median(plain) / batches)
            for name, ratios in times.items():
                numbers = {"median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
                row = {"network": title, "batch": batch, "weights": weights, "backend": name, "milliseconds": of_plain}
                yield row | {key: digits(value) for key, value in numbers.items()}
            print(f"timed {title}, {weights}", flush=True)


def gradients(model: nn.Module, loader: DataLoader[Any]) -> None:
    for x, y in loader:
        model.zero_grad()
        F.cross_entropy(model(x), y, reduction="sum").backward()


def cpu_time(call: Callable[..., Any], *arguments: Any) -> float:
    start = time.process_time()
    call(*arguments)
    return time.process_time() - start


def mean_and_error(values: Sequence[float], scale: float = 1, places: int = 3) -> str:
    mean = scale * statistics.fmean(values)
    error = scale * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{mean:.{places}f} ± {error:.{places}f}"


def quality_table(rows: list[dict[str, Any]]) -> str:
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["network"], row["weights"], row["backend"], row["tuning"]), []).append(row)
    strange = [name for name in rows[0]["scores"] if name.startswith("AUROC")]
    table = []
    for key, found in groups.items():
        of = {name: [row["scores"][name] for row in found] for name in found[0]["scores"]}
        priors = [row["prior"] for row in found if row["prior"] is not None]
        table.append(
            [
                *key,
                f"{statistics.median(priors):.3g}" if priors else "",
                mean_and_error(of["nll"]),
                mean_and_error(of["ece"], 100, 2),
                *[mean_and_error(of[name], 100, 1) for name in strange],
                mean_and_error(of["accuracy"], 100, 1),
            ]
        )
    columns = ["network", "weights", "diagonal", "prior precision by", "its median", "NLL", "ECE, %"]
    return markdown_table([*columns, *[f"{name}, %" for name in strange], "accuracy, %"], table)


def times_table(rows: list[dict[str, Any]]) -> str:
    """A row per backend, and a column per network and choice of weights."""
    columns = list(dict.fromkeys([(row["network"], row["weights"], row["batch"]) for row in rows]))
    cells = {
        (row["backend"], row["network"], row["weights"]): f"{row['median']:.1f} ({row['lowest']:.1f}–{row['highest']:.1f})"
        for row in rows
    }
    names = [f"{network}, batch {batch}: {weights.replace('_', ' ')}" for network, weights, batch in columns]
    table = [[name, *[cells.get((name, *column[:2]), "") for column in columns]] for name in BACKENDS]
    return markdown_table(["backend", *names], table)


def page(found: dict[str, Any]) -> str:
    size = found["size"]
    ratios = [[row["network"], row["backend"], ", ".join(f"{ratio:.2f}" for ratio in row["ratios"])] for row in found["shares"]]
    timed = (
        f"""
## Time of fit

CPU time on one thread, as a multiple of the forward and backward passes over the same batches in the same round: medians of
{found["rounds"]} rounds, with the lowest and highest. Images are random. CurvlinopsGGN is laplace-torch's default. It was not
run for all weights of 3C3D, whose Jacobian is too large, and CurvlinopsEF and AsdlGGN were not run for last layers.

{times_table(found["times"])}
"""
        if found["times"]
        else ""
    )
    return f"""# Laplace approximations: {found["dataset"]}

{made_by(found)}
{size["train"]} images for training ({size["epochs"]} epochs, Adam, no weight decay), {size["validation"]} for
validation, {size["test"]} for testing; means and standard errors of {len(found["seeds"])} seeds, which differ in images and
initial weights. AUROC: of the highest probability, for telling test images from others.
Predictions are linearized, with the probit approximation.

{quality_table(found["rows"])}

## Sums over parameters

The diagonal's sum over each parameter as a multiple of the exact one's, in the order of `model.parameters()`, for seed 0.

{markdown_table(["network", "diagonal", "multiples"], ratios)}
{timed}"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=list(SIZES), default="digits")
    parser.add_argument("--data", type=Path, help="where MNIST and the EMNIST-47 subset are; digits need no files")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=0, help="of timing; 0 for none")
    parser.add_argument("--epochs", type=int, help="of training")
    parser.add_argument("--out", type=Path, default=Path("results/laplace"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of the libraries
    try:
        dataset = load(options.dataset, options.data)
        size = SIZES[options.dataset]
        size = Size(size.train, size.validation, size.test, options.epochs or size.epochs)
        seeds = list(range(options.seeds))
        record = {**header("uncertainty.py", arguments), "dataset": dataset.title, "size": vars(size), "seeds": seeds}
        rows: list[dict[str, Any]] = []
        record |= {"rows": rows, "shares": [], "rounds": options.rounds, "times": []}
        for seed in seeds:
            task = task_of(dataset, seed, size, options.data)
            for network in NETWORKS:
                model = trained(network, task, seed, size.epochs)
                for weights in ("all", "last_layer"):
                    what = {"network": network, "weights": weights, "seed": seed}
                    rows += [what | row for row in rows_of(model, task, weights, seed)]
                if seed == 0:
                    record["shares"] += [{"network": network} | row for row in shares(model, task)]
                print(f"{network}, seed {seed}", flush=True)
    except DataError as error:
        print(message(error), file=sys.stderr)
        return 2
    if options.rounds:
        record["times"] = list(timings(8, options.rounds))
    options.out.mkdir(parents=True, exist_ok=True)
    save(options.out / options.dataset, record, page(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
