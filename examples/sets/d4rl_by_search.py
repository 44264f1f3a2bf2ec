"""Generate offline trajectories in D4RL's layout, if its releases are not available.

    python examples/sets/d4rl_by_search.py --env Hopper --quality medium --out DATA_DIR

Policies are linear in standardised observations and found by augmented random search in gymnasium's
v5 environments. Source: Mania, Guy and Recht, "Simple random search of static linear policies is
competitive for reinforcement learning", NeurIPS 2018, algorithm 2, V2-t. An iteration plays weights
M + ν δ and M − ν δ for random directions δ; directions with the best returns update the weights:

    M ← M + α / (b σ) Σ_k (r(M + ν δ_k) − r(M − ν δ_k)) δ_k.

The qualities are: random, uniform actions; medium, the first policy with a third of the score of
D4RL's expert, and expert, the first above 95, both with Gaussian noise of 0.1; medium-replay, all
episodes of the search up to medium; medium-expert, both. The result is a function of the flags. On
one CPU thread Hopper's medium takes 93,059 steps of search, its expert 1,041,648 (two minutes),
HalfCheetah's medium 5,360,000. Linear policies do not reach the expert of Walker2d and HalfCheetah
within an hour: --accept uses the best one found.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from datamodules.trajectories.environments import ENVIRONMENTS, Environment, Quality
from datamodules.trajectories.files import file_name
from datamodules.trajectories.toy_environment import TOY
from lit_probattn.rollouts.environments import make_environment

TARGETS = {"medium": 100 / 3, "expert": 95.0}  # scores at which a policy is accepted
NOISE = 0.1  # action noise of medium and expert
DIRECTIONS, SEARCHING, JUDGING, RANDOM, PLAYING = range(5)  # streams of keys
KEYS = ("observations", "actions", "rewards", "terminals", "timeouts")


class Settings(NamedTuple):
    """Settings of the search: α, directions, used directions, ν, bonus for being alive."""

    step_size: float
    num_directions: int
    num_best: int
    noise: float
    alive_bonus: float  # subtracted from the reward of each step
    judge_every: int
    budget: int  # steps of the whole search


SETTINGS = {
    "HalfCheetah": Settings(0.02, 8, 4, 0.03, 0.0, 5, 8_000_000),
    "Hopper": Settings(0.01, 8, 4, 0.025, 1.0, 2, 3_000_000),
    "Walker2d": Settings(0.03, 16, 8, 0.025, 1.0, 5, 4_000_000),
    "Toy": Settings(0.1, 4, 2, 0.1, 0.0, 2, 20_000),
}


class Policy(NamedTuple):
    """Linear in standardised observations; without weights, uniform actions."""

    weights: np.ndarray | None  # (act_dim, obs_dim)
    mean: np.ndarray
    std: np.ndarray
    noise: float = 0.0


class Simulator:
    """Plays episodes, each a function of its policy and key."""

    def __init__(self, environment: Environment) -> None:
        self.environment, self._env = environment, make_environment(environment.name)

    def play(self, policy: Policy, key: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Return arrays by D4RL's names, with the observations of the simulator."""
        rng = np.random.default_rng(key)
        seen, _ = self._env.reset(seed=int(rng.integers(2**31)))
        rows: list[tuple[Any, ...]] = []
        terminated = truncated = False
        while not (terminated or truncated):
            action = self._act(policy, seen, rng)
            after, reward, terminated, truncated, _ = self._env.step(action)
            rows.append((seen, action, reward, terminated, truncated and not terminated))
            seen = after
        return {
            key: np.array(rows) for key, rows in zip(KEYS, zip(*rows, strict=True), strict=True)
        }

    def _act(self, policy: Policy, seen: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if policy.weights is None:
            return rng.uniform(-1, 1, self.environment.act_dim).astype(np.float32)
        action = policy.weights @ ((seen - policy.mean) / policy.std)
        if policy.noise:
            action = action + policy.noise * rng.standard_normal(len(action))
        return action.clip(-1, 1).astype(np.float32)


class Search:
    """The current policy and the statistics of its episodes."""

    def __init__(self, simulator: Simulator, seed: int) -> None:
        environment = simulator.environment
        self.simulator, self.seed, self.settings = simulator, seed, SETTINGS[environment.name]
        self.weights = np.zeros((environment.act_dim, environment.obs_dim))
        self.iteration = self.count = 0
        self.mean, self.squares = np.zeros(environment.obs_dim), np.zeros(environment.obs_dim)

    def policy(self, noise: float = 0.0) -> Policy:
        """Return the current policy."""
        ones = np.ones_like(self.mean)
        std = np.sqrt(self.squares / self.count) + 1e-6 if self.count else ones
        return Policy(self.weights, self.mean, std, noise)

    def iterate(self) -> list[dict[str, np.ndarray]]:
        """Play one iteration and update the weights; return its episodes."""
        settings, centre = self.settings, self.policy()
        rng = np.random.default_rng((self.seed, DIRECTIONS, self.iteration))
        deltas = rng.standard_normal((settings.num_directions, *self.weights.shape))
        episodes = [
            self.simulator.play(
                centre._replace(weights=self.weights + sign * settings.noise * delta),
                (self.seed, SEARCHING, self.iteration, number, (1 - sign) // 2),
            )
            for number, delta in enumerate(deltas)
            for sign in (1, -1)
        ]
        paid = [e["rewards"].sum() - settings.alive_bonus * len(e["rewards"]) for e in episodes]
        returns = np.array(paid).reshape(-1, 2)
        best = np.argsort(-returns.max(axis=1), kind="stable")[: settings.num_best]
        gain = returns[best, 0] - returns[best, 1]
        step = settings.step_size / (len(best) * (returns[best].std() + 1e-8))
        self.weights = self.weights + step * np.einsum("k,kad->ad", gain, deltas[best])
        self._count(np.concatenate([episode["observations"] for episode in episodes]))
        self.iteration += 1
        return episodes

    def _count(self, new: np.ndarray) -> None:
        total, shift = self.count + len(new), new.mean(axis=0) - self.mean
        squares = self.squares + ((new - new.mean(axis=0)) ** 2).sum(axis=0)
        self.squares = squares + shift**2 * self.count * len(new) / total
        self.mean, self.count = self.mean + shift * len(new) / total, total

    def judge(self) -> float:
        """Return the score of the current policy."""
        keys = ((self.seed, JUDGING, self.iteration, number) for number in range(4))
        totals = [self.simulator.play(self.policy(), key)["rewards"].sum() for key in keys]
        return self.simulator.environment.score(float(np.mean(totals)))


def found(
    search: Search, target: float, budget: int, accept: bool, keep: bool
) -> tuple[Policy, list[Any]]:
    """Search until a score is reached; return the policy, and with `keep` the episodes.

    Raises:
        SystemExit: the budget is exhausted, and the best policy is not accepted.
    """
    seen: list[Any] = []
    best = (-np.inf, search.policy(NOISE))
    while search.count < budget:
        played = search.iterate()
        seen += played if keep else []
        if search.iteration % search.settings.judge_every:
            continue
        score, policy = search.judge(), search.policy(NOISE)
        best = max(best, (score, policy), key=lambda each: each[0])
        print(f"{search.count} steps, score {score:.1f}, best {best[0]:.1f}", flush=True)
        if score >= target:
            return policy, seen
    if not accept:
        raise SystemExit(
            f"error: score {target:.1f} was not reached in {search.count} steps, best "
            f"{best[0]:.1f}: increase --budget, or accept the best policy with --accept"
        )
    return best[1], seen


def episodes(options: argparse.Namespace, environment: Environment, quality: str) -> Iterator[Any]:
    """Yield the episodes of a quality, in order."""
    simulator = Simulator(environment)
    search = Search(simulator, options.seed)
    if quality == "random":
        policy, stream = search.policy()._replace(weights=None), RANDOM
    else:
        level = quality.partition("-")[0]
        budget = options.budget or search.settings.budget
        is_replay = quality == "medium-replay"
        policy, seen = found(search, TARGETS[level], budget, options.accept, is_replay)
        if is_replay:
            yield from seen
            return
        stream = PLAYING + list(TARGETS).index(level)
    steps = 0
    for number in itertools.count():
        episode = simulator.play(policy, (options.seed, stream, number))
        yield episode
        steps += len(episode["rewards"])
        if steps >= options.num_steps:
            return


def main(arguments: list[str] | None = None) -> None:
    """Write the file for one environment and quality."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    environments = {each.name: each for each in (*ENVIRONMENTS.values(), TOY)}
    parser.add_argument("--env", choices=environments, required=True)
    parser.add_argument("--quality", choices=get_args(Quality), required=True)
    parser.add_argument("--out", type=Path, required=True, help="data folder")
    parser.add_argument("--num_steps", type=int, default=1_000_000, help="minimum number of steps")
    parser.add_argument("--budget", type=int, help="maximum number of search steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of search and episodes")
    parser.add_argument("--accept", action="store_true", help="accept the best policy found")
    options = parser.parse_args(arguments)
    import h5py

    environment = environments[options.env]
    path = options.out / file_name(environment, options.quality, environment.version or "toy")
    if path.exists():
        raise SystemExit(f"error: {path} exists: remove it, or choose another folder with --out")
    both = options.quality == "medium-expert"
    parts = ("medium", "expert") if both else (options.quality,)
    made = [episode for part in parts for episode in episodes(options, environment, part)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "x") as file:
        for key in KEYS:
            rows = np.concatenate([episode[key] for episode in made])
            kind = np.bool_ if key in ("terminals", "timeouts") else np.float32
            file.create_dataset(key, data=rows.astype(kind), compression="gzip")
    scores = [environment.score(float(episode["rewards"].sum())) for episode in made]
    steps = sum(len(episode["rewards"]) for episode in made)
    print(f"{path}: {steps} steps, {len(made)} episodes, mean score {np.mean(scores):.1f}")


if __name__ == "__main__":
    main()
