"""UR-Reacher-2D of SenseAct on a simulated UR5: move the end effector to a point of the (y, z) plane with two joints (Fig. 7).

The arm receives and sends packets at 125 Hz. An action lasts for five packets (40 ms). It commands velocities of shoulder lift
and elbow. The :class:`VelocityProfile` approaches them with limited acceleration, and servos follow it. The other joints do not
move.
"""

from __future__ import annotations

from collections import deque
from math import cos, isfinite, pi, sin
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from numpy.typing import NDArray

from ..install import how_to_install

try:
    import mujoco
except ModuleNotFoundError:
    raise ModuleNotFoundError(f"UR-Reacher is simulated by MuJoCo: {how_to_install('rl')}") from None

Vector: TypeAlias = NDArray[np.float64]

# Denavit–Hartenberg parameters of the UR5, in metres and radians
DH_D = (0.089159, 0.0, 0.0, 0.10915, 0.09465, 0.0823)
DH_A = (0.0, -0.425, -0.39225, 0.0, 0.0, 0.0)
DH_ALPHA = (pi / 2, 0.0, 0.0, pi / 2, -pi / 2, 0.0)

REST = np.array([1.58724391, -2.4, 1.5, -0.71790582, 1.63685572, 1.00910473])  # the pose of every reset
MOVING = slice(1, 3)  # shoulder lift and elbow
JOINT_LOW, JOINT_HIGH = np.radians([-170.0, -150.0]), np.radians([-10.0, 150.0])
TARGET_LOW, TARGET_HIGH = np.array([-0.2, -0.3, 0.5]), np.array([0.2, 0.4, 1.0])
SAFE_LOW, SAFE_HIGH = np.array([-0.2, -10.0, 0.4]), np.array([0.2, 0.9, 10.0])
MARGIN = 0.01  # radians or metres to keep from the limits, since the arm lags behind the profile

TICK = 0.008  # seconds between packets
TICKS = 5  # per action
ACCELERATION = 2.0  # radians/s², of the joint whose velocity changes most


def forward_kinematics(q: Any) -> Vector:
    """The end effector's pose (4, 4) for six joint angles: a rotation by π about z, then Rz(q) Tz(d) Tx(a) Rx(α) per joint."""
    pose = np.diag([-1.0, -1.0, 1.0, 1.0])
    for angle, d, a, alpha in zip(q, DH_D, DH_A, DH_ALPHA, strict=True):
        c, s, ca, sa = cos(angle), sin(angle), cos(alpha), sin(alpha)
        pose = pose @ np.array([[c, -s * ca, s * sa, a * c], [s, c * ca, -c * sa, a * s], [0, sa, ca, d], [0, 0, 0, 1]])
    return pose


def _planar() -> tuple[Vector, Vector]:
    """(o, M) with end effector = o + M (cos q₂, sin q₂, cos(q₂+q₃), sin(q₂+q₃)) while the other joints rest."""

    def position(lift: float, elbow: float) -> Vector:
        return forward_kinematics([REST[0], lift, elbow, *REST[3:]])[:3, 3]

    # With q₂+q₃ fixed, only the upper arm turns; with q₂ fixed, only the forearm. Opposite angles are two columns apart.
    upper = [(position(q, -q) - position(q + pi, -q - pi)) / 2 for q in (0.0, pi / 2)]
    fore = [(position(0.0, q) - position(0.0, q + pi)) / 2 for q in (0.0, pi / 2)]
    matrix = np.stack([*upper, *fore], axis=1)
    return position(0.0, 0.0) - matrix[:, 0] - matrix[:, 2], matrix


OFFSET, PLANE = _planar()
# plain numbers, which are faster than such small arrays
_ROWS: list[list[float]] = np.column_stack([OFFSET, PLANE]).tolist()
_LOW: list[float] = [*(JOINT_LOW + MARGIN).tolist(), *(SAFE_LOW + MARGIN).tolist()]  # of two joint angles and (x, y, z)
_HIGH: list[float] = [*(JOINT_HIGH - MARGIN).tolist(), *(SAFE_HIGH - MARGIN).tolist()]


def tip(q: Any) -> list[float]:
    """The end effector's position (x, y, z) for the angles (2) of shoulder lift and elbow, with the other joints at rest."""
    c, s, cc, ss = cos(q[0]), sin(q[0]), cos(q[0] + q[1]), sin(q[0] + q[1])
    return [o + a * c + b * s + d * cc + e * ss for o, a, b, d, e in _ROWS]


def resolved_rate(observation: Vector, *, gain: float = 4.0, damping: float = 0.05, max_speed: float = 1.0) -> Vector:
    """A scripted controller's action: Jᵀ (J Jᵀ + damping²)⁻¹ · gain · (target − end effector), slowed down to ``max_speed``."""
    c, s, cc, ss = (f(angle) for angle in (observation[0], observation[0] + observation[1]) for f in (cos, sin))
    jacobian = PLANE[1:] @ np.array([[-s, 0.0], [c, 0.0], [-ss, -ss], [cc, cc]])
    velocity = jacobian.T @ np.linalg.solve(jacobian @ jacobian.T + damping**2 * np.eye(2), -gain * observation[4:6])
    return velocity * min(1.0, max_speed / max(abs(velocity).max(), 1e-12))


class VelocityProfile:
    """The motion that the servos follow. Velocities approach the command: the one that changes most at 2 rad/s², and the other in
    proportion, so that both reach it at the same time.

    A command after which the arm could not stop within the joint limits and the safety box is not executed. Instead, one of the
    two joints stops, if that is enough, or else both.
    """

    def __init__(self) -> None:
        self.q: list[float] = REST[MOVING].tolist()
        self.v = [0.0, 0.0]

    def tick(self, command: list[float]) -> bool:
        """Advance by one packet. Returns whether the command was executed."""
        u, w = command
        for attempt in ((u, w), (0.0, w), (u, 0.0)):
            q, v = self._after(attempt)
            if self._can_stop(q, v):
                self.q, self.v = q, v
                return attempt == (u, w)
        self.q, self.v = self._after((0.0, 0.0))
        return False

    def _after(self, command: tuple[float, float]) -> tuple[list[float], list[float]]:
        (lift, elbow), (v, w) = self.q, self.v
        dv, dw = command[0] - v, command[1] - w
        scale = min(1.0, ACCELERATION * TICK / max(abs(dv), abs(dw), 1e-300))
        v2, w2 = v + scale * dv, w + scale * dw
        return [lift + (v + v2) / 2 * TICK, elbow + (w + w2) / 2 * TICK], [v2, w2]

    @staticmethod
    def _can_stop(q: list[float], v: list[float]) -> bool:
        """Whether the arm, if it brakes now, stops within the limits. The path between two safe poses is safe."""
        lead = max(abs(v[0]), abs(v[1]))
        last = lead % (ACCELERATION * TICK)  # the decrease of speed in the last packet of braking
        time = ((lead**2 - last**2) / (2 * ACCELERATION) + last * TICK / 2) / lead if lead else 0.0
        at = [q[0] + time * v[0], q[1] + time * v[1]]
        x, y, z = tip(at)
        return (
            _LOW[0] <= at[0] <= _HIGH[0]
            and _LOW[1] <= at[1] <= _HIGH[1]
            and _LOW[2] <= x <= _HIGH[2]
            and _LOW[3] <= y <= _HIGH[3]
            and _LOW[4] <= z <= _HIGH[4]
        )


class URReacher(gymnasium.Env[Vector, Vector]):
    """Reach a target in the plane with two joints of a UR5, in the 100 steps of ``gymnasium.make("hesscale/UR-Reacher-2D-v0")``.

    - Action (2): velocities of shoulder lift and elbow in rad/s, clipped to ±``max_speed``.
    - Observation (8): joint angles (2), their velocities / ``max_speed`` (2), (y, z) of the end effector minus the target (2),
      the last action / ``max_speed`` (2).
    - Reward: 5 (−d + exp(−d² / 0.01)) for the observed distance d in metres.
    - Reset: the arm is at rest in ``REST``. The target is the position for uniformly drawn joint angles, redrawn until it lies in
      the target box.
    - Info: ``distance``, and ``held``, the number of packets of this step in which a limit prevented the command.

    Args:
        max_speed: the maximum joint velocity in rad/s.
        action_delay: the delay of commands, in packets of 8 ms.
        observation_delay: the delay of observations, in packets.
        substeps: simulation steps per packet. With one, the arm follows the profile badly.
        render_mode: ``"rgb_array"``, ``"human"`` or None.
    """

    metadata = {"render_modes": ["human", "rgb_array"], "render_fps": round(1 / (TICK * TICKS))}  # noqa: RUF012

    def __init__(
        self,
        *,
        max_speed: float = 1.0,
        action_delay: int = 1,
        observation_delay: int = 1,
        substeps: int = 2,
        render_mode: str | None = None,
        width: int = 480,
        height: int = 480,
    ) -> None:
        if not 0 < max_speed <= pi:
            raise ValueError(f"max_speed must be more than 0 and at most π rad/s, the limit of a UR5's joints, not {max_speed}")
        for name, value, least in (
            ("action_delay", action_delay, 0),
            ("observation_delay", observation_delay, 0),
            ("substeps", substeps, 2),
            ("width", width, 1),
            ("height", height, 1),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"render_mode must be None or one of {self.metadata['render_modes']}, not {render_mode!r}")
        self.max_speed, self.substeps = max_speed, substeps
        self.action_delay, self.observation_delay = action_delay, observation_delay
        self.render_mode, self._size = render_mode, (width, height)
        self._renderer: Any = None
        self.action_space = gymnasium.spaces.Box(-max_speed, max_speed, (2,), np.float32)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (8,), np.float64)
        self.model = mujoco.MjModel.from_xml_path(str(Path(__file__).with_name("ur5.xml")))
        self.model.opt.timestep = TICK / substeps
        self.data = mujoco.MjData(self.model)
        # A position servo moves at a velocity if velocity · kv / kp is added to its target angle.
        self._lead = (-self.model.actuator_biasprm[MOVING, 2] / self.model.actuator_gainprm[MOVING, 0]).tolist()
        # one of the packets between two observations is observed, in this step or in a later one
        self._seen = (TICKS - 1 - observation_delay) % TICKS

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Vector, dict[str, Any]]:
        super().reset(seed=seed)
        if options:
            raise ValueError(f"UR-Reacher's reset takes no options, but got {sorted(options)}")
        self.target = self._draw_target()
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:] = self.data.ctrl[:] = REST
        self.data.mocap_pos[0] = self.target
        mujoco.mj_forward(self.model, self.data)
        self._profile = VelocityProfile()
        self._commands = deque([[0.0, 0.0]] * self.action_delay)
        late = self.observation_delay // TICKS + 1
        self._packets = deque([self._packet()] * late, maxlen=late)
        self._action = [0.0, 0.0]
        self._draw("human")
        observation, distance = self._observe()
        return observation, {"distance": distance, "held": 0}

    def step(self, action: Any) -> tuple[Vector, float, bool, bool, dict[str, Any]]:
        action = np.asarray(action, dtype=np.float64)
        if action.shape != (2,) or not all(map(isfinite, action.tolist())):
            raise ValueError(f"an action must be two finite velocities, not {action}")
        most, held = self.max_speed, 0
        self._action = [min(max(velocity, -most), most) for velocity in action.tolist()]
        for tick in range(TICKS):
            self._commands.append(self._action)
            held += not self._tick(self._commands.popleft())
            if tick == self._seen:
                self._packets.append(self._packet())
        mujoco.mj_kinematics(self.model, self.data)  # the poses for rendering
        self._draw("human")
        observation, d = self._observe()
        return observation, 5 * (-d + float(np.exp(-(d**2) / 0.01))), False, False, {"distance": d, "held": held}

    def render(self) -> Any:
        return self._draw("rgb_array")

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    def _tick(self, command: list[float]) -> bool:
        """Simulate one packet. Returns whether the command was executed."""
        profile, model, data, count = self._profile, self.model, self.data, self.substeps
        (lift, elbow), (v, w) = profile.q, profile.v
        carried_out = profile.tick(command)
        dv, dw = profile.v[0] - v, profile.v[1] - w
        ctrl, (lead, other_lead) = data.ctrl, self._lead
        for substep in range(1, count + 1):
            # Velocities change linearly from v to profile.v. An implicit step needs the angle before and the velocity after it.
            before, after = (substep - 1) / count, substep / count
            ctrl[1] = lift + before * TICK * (v + before * dv / 2) + lead * (v + after * dv)
            ctrl[2] = elbow + before * TICK * (w + before * dw / 2) + other_lead * (w + after * dw)
            mujoco.mj_step(model, data)
        return carried_out

    def _packet(self) -> list[float]:
        """The current angles (2), velocities (2) and (y, z) of the end effector."""
        data = self.data
        mujoco.mj_kinematics(self.model, data)
        return [*data.qpos[MOVING].tolist(), *data.qvel[MOVING].tolist(), *data.site_xpos[0, 1:].tolist()]

    def _observe(self) -> tuple[Vector, float]:
        """The observation, and the distance in it."""
        most, (lift, elbow, v, w, y, z) = self.max_speed, self._packets[0]
        _, to_y, to_z = self.target.tolist()
        y, z = y - to_y, z - to_z
        observation = np.array([lift, elbow, v / most, w / most, y, z, self._action[0] / most, self._action[1] / most])
        return observation, float(np.hypot(y, z))

    def _draw_target(self) -> Vector:
        while True:
            target = np.array(tip(self.np_random.uniform(JOINT_LOW, JOINT_HIGH)))
            if (target >= TARGET_LOW).all() and (target <= TARGET_HIGH).all():
                return target

    def _draw(self, mode: str) -> Any:
        """The rendered image, if this is the render mode; otherwise None."""
        if self.render_mode != mode:
            return None
        if self._renderer is None:
            from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer

            width, height = self._size
            self._renderer = MujocoRenderer(self.model, self.data, width=width, height=height, camera_name="side")
        return self._renderer.render(mode)
