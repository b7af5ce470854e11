"""Recurrent PPO in one file: a memory that is reset inside the sequence, by `reset=`, where an episode begins.

Two tasks that need memory: CartPole without its velocities, and naming the symbol shown two steps ago. Models are a
block with ADPTNet, the same block with a GRU, and the ADPTNet block without memory (reset at every step).

    python examples/recurrent_ppo.py    # all, one seed: a few minutes of CPU time
    python examples/recurrent_ppo.py --task repeat-previous --model adptnet gru --seeds 0 1 2

Prints the mean return of the last 100 episodes before each report, and the largest possible return. A
rollout of `STEPS` steps is one sequence per environment: the policy runs along it in one call per update, from the
state that it had at its first step.
"""

import argparse
import collections
import dataclasses
import math
import time

import torch
from torch import Tensor
from torch.nn import functional

from adptnet import SequenceModel, cells, nn, presets

ENVIRONMENTS, STEPS = 32, 128


class MaskedCartPole:
    """A pole on a cart, of which only the position and the angle are seen; one reward per step, 500 steps at most."""

    features, actions, best = 2, 2, 500.0

    def __init__(self, count: int, generator: torch.Generator):
        self.count, self.generator = count, generator
        self.state = self._draw()
        self.age = torch.zeros(count)

    def _draw(self) -> Tensor:
        return 0.1 * torch.rand(self.count, 4, generator=self.generator) - 0.05  # position, speed, angle, angular speed

    def observe(self) -> Tensor:
        return self.state[:, [0, 2]] * torch.tensor([1.0, 5.0])

    def step(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return rewards and whether episodes ended. Environments whose episode ended begin the next one."""
        _, speed, angle, spin = self.state.unbind(-1)
        force = 20.0 * action - 10.0  # N; cart 1 kg, pole 0.1 kg and 1 m long, steps of 20 ms
        sine, cosine = angle.sin(), angle.cos()
        push = (force + 0.05 * spin.square() * sine) / 1.1
        turn = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))
        thrust = push - 0.05 * turn * cosine / 1.1
        self.state = self.state + 0.02 * torch.stack((speed, thrust, spin, turn), -1)
        self.age = self.age + 1
        fallen = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > math.radians(12))
        ended = fallen | (self.age >= self.best)
        self.state = torch.where(ended.unsqueeze(-1), self._draw(), self.state)
        self.age = torch.where(ended, 0.0, self.age)
        return torch.ones(self.count), ended


class RepeatPrevious:
    """Random symbols; the action must name the one shown `DELAY` steps before. Returns are between -1 and 1."""

    DELAY, LENGTH = 2, 50
    features, actions, best = 4, 4, 1.0

    def __init__(self, count: int, generator: torch.Generator):
        self.count, self.generator = count, generator
        self.shown = torch.randint(4, (count, self.LENGTH), generator=generator)
        self.age = 0

    def observe(self) -> Tensor:
        return 1.0 * functional.one_hot(self.shown[:, self.age], 4)

    def step(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return rewards and whether episodes ended. Environments whose episode ended begin the next one."""
        reward = torch.zeros(self.count)
        if self.age >= self.DELAY:
            right = action == self.shown[:, self.age - self.DELAY]
            reward = (2.0 * right.float() - 1.0) / (self.LENGTH - self.DELAY)
        self.age += 1
        ended = torch.full((self.count,), self.age == self.LENGTH)
        if self.age == self.LENGTH:
            self.shown = torch.randint(4, (self.count, self.LENGTH), generator=self.generator)
            self.age = 0
        return reward, ended


TASKS = {"cart-pole": MaskedCartPole, "repeat-previous": RepeatPrevious}
UPDATES = {"cart-pole": 120, "repeat-previous": 120}
GAMMA = {"cart-pole": 0.99, "repeat-previous": 0.5}  # actions have no effect on what is shown later
MODELS = ("adptnet", "gru", "no-memory")


def make_model(name: str, task: type) -> SequenceModel:
    """Return a model from observations to the logits of the actions and a value."""
    block = presets.tracking(64)
    if name == "gru":
        block = dataclasses.replace(block, layer=nn.LayerSpec(cells.GRU(64)))
    return SequenceModel(block, input_size=task.features, output_size=task.actions + 1)


def evaluate_policy(model: SequenceModel, seen: Tensor, state, starts: Tensor, has_memory: bool):
    """Return log-probabilities of the actions and values, (batch, time, ...), and the state after the last step."""
    reset = starts if has_memory else torch.ones_like(starts)
    outputs, state = model(seen, state, reset=reset)
    return outputs[..., :-1].log_softmax(-1), outputs[..., -1], state


def estimate_advantages(rewards: Tensor, values: Tensor, ended: Tensor, gamma: float, decay: float = 0.95) -> Tensor:
    """Return generalized advantage estimates (batch, time); `values` has one step more."""
    advantages, advantage = torch.zeros_like(rewards), torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        goes_on = (~ended[:, t]).float()
        error = rewards[:, t] + gamma * values[:, t + 1] * goes_on - values[:, t]
        advantage = error + gamma * decay * goes_on * advantage
        advantages[:, t] = advantage
    return advantages


def learn(task_name: str, model_name: str, seed: int, updates: int | None = None, report: bool = True) -> list[float]:
    """Train a policy and return the mean return of the last 100 episodes after each update."""
    task, gamma = TASKS[task_name], GAMMA[task_name]
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    environment = task(ENVIRONMENTS, generator)
    model, has_memory = make_model(model_name, task), model_name != "no-memory"
    updates = UPDATES[task_name] if updates is None else updates
    optimizer = torch.optim.Adam(model.parameters(), 3e-3, eps=1e-5)
    state, start = None, torch.ones(ENVIRONMENTS, dtype=torch.bool)
    returns, totals = collections.deque(maxlen=100), torch.zeros(ENVIRONMENTS)
    curve: list[float] = []
    begin = time.process_time()
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - update / updates)
        first, steps = state, []
        with torch.no_grad():
            for _ in range(STEPS):
                seen = environment.observe()
                logs, value, state = evaluate_policy(model, seen.unsqueeze(1), state, start.unsqueeze(1), has_memory)
                action = torch.multinomial(logs[:, 0].exp(), 1, generator=generator)[:, 0]
                reward, ended = environment.step(action)
                log = logs[:, 0].gather(1, action.unsqueeze(1))[:, 0]
                steps.append((seen, start, action, log, value[:, 0], reward, ended))
                totals += reward
                returns.extend(totals[ended].tolist())
                totals[ended] = 0.0
                start = ended
            _, value, _ = evaluate_policy(
                model, environment.observe().unsqueeze(1), state, start.unsqueeze(1), has_memory
            )
            seen, starts, actions, old, values, rewards, ends = (
                torch.stack(each, 1) for each in zip(*steps, strict=True)
            )
            advantages = estimate_advantages(rewards, torch.cat((values, value), 1), ends, gamma)
        targets = advantages + values
        for _ in range(4):
            for rows in torch.randperm(ENVIRONMENTS, generator=generator).split(ENVIRONMENTS // 4):
                part = None if first is None else first.select(rows)
                logs, value, _ = evaluate_policy(model, seen[rows], part, starts[rows], has_memory)
                ratio = (logs.gather(-1, actions[rows].unsqueeze(-1))[..., 0] - old[rows]).exp()
                gain = advantages[rows]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                policy_loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                value_loss = (value - targets[rows]).square().mean() / (targets.var() + 1e-8)
                entropy = -(logs.exp() * logs).sum(-1).mean()
                optimizer.zero_grad()
                (policy_loss + 0.1 * value_loss - 0.01 * entropy).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
                optimizer.step()
        curve.append(sum(returns) / max(1, len(returns)))
        if report and (update + 1) % 20 == 0:
            done = (update + 1) * ENVIRONMENTS * STEPS
            seconds = time.process_time() - begin
            print(f"  {done:>8,} steps: mean return {curve[-1]:.3g} of {task.best:g}, {seconds:.0f} CPU s", flush=True)
    return curve


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description="Recurrent PPO with resets inside sequences.")
    parser.add_argument("--task", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    arguments = parser.parse_args()
    for task_name in arguments.task:
        for model_name in arguments.model:
            for seed in arguments.seeds:
                print(f"{task_name}, {model_name}, seed {seed}", flush=True)
                learn(task_name, model_name, seed)
