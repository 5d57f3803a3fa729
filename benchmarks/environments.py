"""How fast environments alone can be stepped on one core: agent-steps per second of 1, 16 and 64 of them, by every way to do it.

All ways go through the same course, actions and first states that gymnasium's environments are led through first, so that each
meets the same contacts (envpool has first states of its own). In each round every way goes through it once, in an order drawn
anew. They are compared with the simulator alone: a share is the median over rounds of a way's rate by that of ``mj_step``.
Seconds are those of the processor, which depend less on what else the machine does than those of the clock.

    taskset -c 0 python benchmarks/environments.py --out results/environments
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
import unittest.mock
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))  # from a checkout that is not installed, too

import numpy as np
from records import header, made_by, save

try:
    import gymnasium
    import mujoco
    from gymnasium.vector import AutoresetMode, SyncVectorEnv
    from mujoco import rollout
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"this benchmark needs {error.name}: pip install 'hesscale[rl]'") from None

from hesscale.experiments.bench.measure import digits, message, quartiles, ratios, silence
from hesscale.experiments.bench.methods import NotMeasured
from hesscale.experiments.lab.markdown import markdown_table
from hesscale.experiments.rl.batched_envs import environments
from hesscale.experiments.rl.mujoco_envs import ROBOTS

Array = Any  # of numpy

ENVIRONMENTS = (
    "HalfCheetah-v5",
    "Hopper-v5",
    "Walker2d-v5",
    "Ant-v5",
    "InvertedPendulum-v5",
    "InvertedDoublePendulum-v5",
)
COUNTS = (1, 16, 64)
MAX_STEPS = 1000  # of an environment in a block: as long as the longest episode
STATE = mujoco.mjtState.mjSTATE_FULLPHYSICS.value


# ------------------------------------------------------------------------------------------------------------------ courses


@dataclass
class Course:
    """What environments are led through.

    Attributes:
        actions: (steps, environments, entries), uniform over the space of actions.
        starts: (environments, nq + nv): positions and velocities after the first reset, whose seed is the environment's number.
        resets: for each step, which environments begin anew after it, and in which state.
    """

    name: str
    actions: Array
    starts: Array
    resets: list[list[tuple[int, Array]]]
    model: mujoco.MjModel
    frame_skip: int

    @property
    def count(self) -> int:
        return len(self.starts)

    @property
    def agent_steps(self) -> int:
        return len(self.actions) * self.count


def state_of(env: Any) -> Array:
    data = env.unwrapped.data
    return np.concatenate([data.qpos, data.qvel])


def made(name: str, count: int) -> list[Any]:
    with silence():  # MuJoCo finds attributes of gymnasium's models that it will not know for ever
        return [gymnasium.make(name) for _ in range(count)]


def record(name: str, count: int, steps: int) -> Course:
    envs = made(name, count)
    space = envs[0].action_space
    actions = np.random.default_rng(0).uniform(space.low, space.high, (steps, count, *space.shape)).astype(np.float32)
    starts, resets = [], [[] for _ in range(steps)]
    for k, env in enumerate(envs):
        env.reset(seed=k)
        starts.append(state_of(env))
        for t in range(steps):
            _, _, terminated, truncated, _ = env.step(actions[t, k])
            if terminated or truncated:
                env.reset()
                resets[t].append((k, state_of(env)))
    inner = envs[0].unwrapped
    return Course(name, actions, np.stack(starts), resets, inner.model, inner.frame_skip)


# --------------------------------------------------------------------------------------------------------------------- ways


class Loop:
    """Gymnasium's environments one after another."""

    def __init__(self, course: Course, *, wrapped: bool = True) -> None:
        self.course = course
        self.envs = [env if wrapped else env.unwrapped for env in made(course.name, course.count)]
        self.rest()

    def rest(self) -> None:
        for k, env in enumerate(self.envs):
            env.reset(seed=k)

    def run(self) -> None:
        for actions in self.course.actions:
            for env, action in zip(self.envs, actions, strict=True):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()


class Sync:
    """Gymnasium's vector of environments, in this process."""

    def __init__(self, course: Course) -> None:
        self.course = course
        makers = [lambda: gymnasium.make(course.name)] * course.count
        with silence():
            self.envs = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
        self.rest()

    def rest(self) -> None:
        self.envs.reset(seed=list(range(self.course.count)))

    def run(self) -> None:
        for actions in self.course.actions:
            self.envs.step(actions)


class EnvPool:
    """Environments in C++, with one thread. A reset takes the place of a step there, for which another is made up."""

    def __init__(self, course: Course) -> None:
        try:
            import envpool
        except ImportError as error:
            raise NotMeasured(f"envpool is not installed, or not with all that it needs ({error})") from None

        self.course = course
        self.envs = envpool.make(course.name, env_type="gymnasium", num_envs=course.count, num_threads=1, seed=0)
        self.actions = course.actions.astype(self.envs.action_space.dtype)
        self.rest()

    def rest(self) -> None:
        self.envs.reset()

    def run(self) -> None:
        taken = t = 0
        while taken < self.course.agent_steps:
            infos = self.envs.step(self.actions[t % len(self.actions)])[4]
            taken, t = taken + np.count_nonzero(infos["elapsed_step"]), t + 1


class Ours:
    """As hesscale's agents step them."""

    def __init__(self, course: Course) -> None:
        self.course = course
        self.envs = environments(made(course.name, course.count))
        self.rows = range(course.count)
        self.rest()

    def rest(self) -> None:
        for k in self.rows:
            self.envs.reset(k, k)

    def run(self) -> None:
        for actions in self.course.actions:
            _, _, terminated, truncated = self.envs.step(actions, self.rows)
            for k in np.flatnonzero(terminated | truncated):
                self.envs.reset(int(k))


class Simulator:
    """``mj_step`` alone, and at a reset ``mj_forward``, on one simulation for each environment."""

    def __init__(self, course: Course) -> None:
        self.course = course
        self.data = [mujoco.MjData(course.model) for _ in range(course.count)]
        self.controls = [data.ctrl for data in self.data]
        self.rest()

    def rest(self) -> None:
        for k, start in enumerate(self.course.starts):
            self.begin(k, start)

    def begin(self, k: int, state: Array) -> None:
        model, data = self.course.model, self.data[k]
        mujoco.mj_resetData(model, data)
        data.qpos[:], data.qvel[:] = state[: model.nq], state[model.nq :]
        mujoco.mj_forward(model, data)

    def step(self, actions: Array) -> None:
        model, skip, step = self.course.model, self.course.frame_skip, mujoco.mj_step
        for control, data, action in zip(self.controls, self.data, actions, strict=True):
            control[:] = action
            step(model, data, skip)

    def run(self) -> None:
        for actions, resets in zip(self.course.actions, self.course.resets, strict=True):
            self.step(actions)
            for k, state in resets:
                self.begin(k, state)


class Rollout(Simulator):
    """One call of ``mujoco.rollout`` for all environments; the solver's guess from the step before is lost between calls.

    ``judged``: observations and rewards too, in numpy.
    """

    def __init__(self, course: Course, *, judged: bool = False) -> None:
        size = mujoco.mj_stateSize(course.model, STATE)
        self.pool, self.models = rollout.Rollout(nthread=0), [course.model] * course.count
        self.path: Array = np.empty((course.count, course.frame_skip, size))
        self.sensors: Array = np.empty((course.count, course.frame_skip, course.model.nsensordata))
        self.states: Array = np.zeros((course.count, size))  # time, positions, velocities
        self.robot = robot_of(course) if judged else None
        super().__init__(course)

    def begin(self, k: int, state: Array) -> None:
        self.states[k] = 0
        self.states[k, 1 : 1 + len(state)] = state

    def step(self, actions: Array) -> Any:
        before, skip = self.states, self.course.frame_skip
        controls = np.repeat(actions[:, None].astype(np.float64), skip, axis=1)
        outputs = {"state": self.path, "sensordata": self.sensors}
        self.pool.rollout(self.models, self.data[:1], before, controls, nstep=skip, skip_checks=True, **outputs)
        self.states = self.path[:, -1].copy()
        end = 1 + self.course.starts.shape[1]
        return self.robot and self.robot.judge(before[:, 1:2], self.states[:, 1:end], actions)


def robot_of(course: Course) -> Any:
    """Makes observations and rewards of positions and velocities."""
    (env,) = made(course.name, 1)
    inner = env.unwrapped
    robot = ROBOTS[f"{type(inner).__module__}.{type(inner).__qualname__}"](inner)
    if sum(part.size for part in robot.after(inner.data)) > course.starts.shape[1]:
        raise NotMeasured("its observations and rewards are made of more than positions and velocities")
    return robot


@dataclass(frozen=True)
class Way:
    label: str
    make: Callable[[Course], Any]


WAYS = {
    "loop": Way("gymnasium, one after another", Loop),
    "unwrapped": Way("the same without wrappers", lambda course: Loop(course, wrapped=False)),
    "sync": Way("gymnasium's SyncVectorEnv", Sync),
    "envpool": Way("envpool, one thread", EnvPool),
    "ours": Way("`hesscale.experiments.rl`", Ours),
    "rollout": Way("`mujoco.rollout`, observations and rewards in numpy", lambda course: Rollout(course, judged=True)),
    "rollout-alone": Way("`mujoco.rollout` alone", Rollout),
    "simulator": Way("`mj_step` alone", Simulator),
}
BASE = "simulator"


# ------------------------------------------------------------------------------------------------------------------ measure


def interleaved(cases: Mapping[Any, Any], rounds: int) -> dict[Any, list[float]]:
    """Seconds of the processor that each ``run`` takes, round by round; ``rest`` comes after it."""
    order = random.Random(0)
    times: dict[Any, list[float]] = {key: [] for key in cases}
    gc.collect()
    gc.freeze()  # what is there already is not searched again in some case's time
    for _ in range(rounds):
        for key in order.sample(list(cases), len(cases)):
            start = time.process_time()
            cases[key].run()
            times[key].append(time.process_time() - start)
            cases[key].rest()
    gc.unfreeze()
    return times


def measured(name: str, ways: Iterable[str], counts: Sequence[int], rounds: int, steps: int) -> list[dict[str, Any]]:
    """A row for every way and count: agent-steps per second, their share of the simulator's, or why there are none."""
    rows: list[dict[str, Any]] = []
    cases: dict[int, Any] = {}
    for count in counts:
        course = record(name, count, max(1, min(MAX_STEPS, steps // count)))
        for way in ways:
            rows.append({"way": way, "count": count, "agent_steps": course.agent_steps})
            try:
                cases[len(rows) - 1] = WAYS[way].make(course)
            except NotMeasured as error:
                rows[-1]["error"] = message(error)
    for case in cases.values():
        case.run()
        case.rest()
    rates = {k: [rows[k]["agent_steps"] / spent for spent in found] for k, found in interleaved(cases, rounds).items()}
    base = {rows[k]["count"]: found for k, found in rates.items() if rows[k]["way"] == BASE}
    for k, found in rates.items():
        rows[k]["steps_per_second"] = quartiles(found)
        rows[k]["share_of_simulator"] = ratios(found, base.get(rows[k]["count"]))
        rows[k]["all_steps_per_second"] = [digits(rate) for rate in found]
    return rows


def parts(name: str, rounds: int, steps: int) -> dict[str, float]:
    """Microseconds of an average step of one of gymnasium's environments, by what it does; medians over rounds."""
    course = record(name, 1, min(MAX_STEPS, steps))
    length, ends = len(course.actions), sum(map(len, course.resets))
    (env,) = made(name, 1)
    env.reset(seed=0)
    inner, action = env.unwrapped, course.actions[0, 0]
    model, data, result = inner.model, inner.data, inner.step(action)
    bare_step = inner.step
    idle = unittest.mock.patch.multiple(mujoco, mj_step=lambda *_, **__: None, mj_rnePostConstraint=lambda *_: None)

    def wrapped() -> None:
        inner.step = lambda _: result
        for _ in range(length):
            env.step(action)
        inner.step = bare_step

    def python() -> None:
        with idle:
            for _ in range(length):
                inner.step(action)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a wrapper's, that all results are the same
        wrapped()
    calls = {
        "whole step": Loop(course),
        "`mj_step`": Simulator(course),
        "`mj_rnePostConstraint`": Repeated(lambda: mujoco.mj_rnePostConstraint(model, data), length),
        "observation": Repeated(inner._get_obs, length),
        "reward, end, infos": Repeated(python),
        "wrappers": Repeated(wrapped),
        "resets": Repeated(inner.reset, length),
        "forward": Repeated(lambda: mujoco.mj_forward(model, data), length),
    }
    found = {name: 1e6 * statistics.median(times) / length for name, times in interleaved(calls, rounds).items()}
    found["reward, end, infos"] -= found["observation"]
    found["resets"] = (found["resets"] - found.pop("forward")) * ends / length
    return {name: digits(value) for name, value in found.items()} | {"steps an episode": digits(length / max(ends, 1))}


@dataclass
class Repeated:
    call: Callable[[], Any]
    times: int = 1

    def run(self) -> None:
        for _ in range(self.times):
            self.call()

    def rest(self) -> None:
        pass


# --------------------------------------------------------------------------------------------------------------------- text


def page(found: Mapping[str, Any]) -> str:
    """The tables, made from the record alone."""
    return (
        f"# Environments alone\n\n{made_by(found)} Thousands of agent-steps per second,\n"
        f"resets included, medians and quartiles of {found['rounds']} rounds; the percentage is of what `mj_step` alone does. "
        f"Actions are uniform random\nnumbers.\n\n{speeds(found)}\n"
        "## What a step of gymnasium's takes\n\nMicroseconds of an average step of one environment, with its share of resets. "
        f"Parts are timed by themselves.\n\n{shares(found)}"
    )


def speeds(found: Mapping[str, Any]) -> str:
    counts = found["counts"]
    body, notes = [], []
    for name, entry in found["environments"].items():
        cells: dict[str, dict[int, str]] = {}
        for row in entry["rows"]:
            cells.setdefault(row["way"], {})[row["count"]] = cell(row)
            if "error" in row and row["count"] == counts[0]:
                notes.append(f"- {name}, {WAYS[row['way']].label}: {row['error']}")
        body += [[name, WAYS[way].label, *(by_count[count] for count in counts)] for way, by_count in cells.items()]
    text = markdown_table(["environment", "stepped by", *(f"{count} of them" for count in counts)], body)
    return text + ("\nNot measured:\n\n" + "\n".join(notes) + "\n" if notes else "")


def cell(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return "–"
    median, low, high = (row["steps_per_second"][key] / 1e3 for key in ("median", "q1", "q3"))
    share = row["share_of_simulator"]
    return f"{median:.3g} ({low:.3g}–{high:.3g})" + (f", {share['median']:.0%}" if share else "")


def shares(found: Mapping[str, Any]) -> str:
    entries = {name: entry["parts"] for name, entry in found["environments"].items()}
    names = list(next(iter(entries.values())))
    body = [
        [name, *(f"{value:.3g}" if value < 100 else f"{value:.0f}" for value in entry.values())]
        for name, entry in entries.items()
    ]
    return markdown_table(["environment", *names], body)


# ------------------------------------------------------------------------------------------------------------------ command


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--envs", nargs="+", choices=ENVIRONMENTS, default=ENVIRONMENTS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--counts", nargs="+", type=int, default=COUNTS, help="of environments")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3200, help="agent-steps of a block")
    parser.add_argument("--out", type=Path, default=Path("results/environments"))
    options = parser.parse_args(arguments)
    if min(*options.counts, options.rounds, options.steps) < 1:
        parser.error("--counts, --rounds and --steps must be at least 1")
    found = header("environments.py", arguments) | {"rounds": options.rounds, "counts": list(options.counts), "environments": {}}
    for name in options.envs:
        start = time.perf_counter()
        rows = measured(name, options.ways, options.counts, options.rounds, options.steps)
        found["environments"][name] = {"rows": rows, "parts": parts(name, options.rounds, options.steps)}
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    save(options.out / "environments", found, page(found))


if __name__ == "__main__":
    main()
