"""`ADPTModule`: both modes give the results of the layer, and an episode never sees the one before."""

import warnings

import pytest
import torch
from torch.testing import assert_close

from adptnet import ADPTNet, Recurrent, SequenceModel, Stack, cells, drive
from adptnet.errors import InputError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torchrl's own import
    pytest.importorskip("torchrl", reason="torchrl is not installed: pip install 'adptnet[rl]'")
    from tensordict import TensorDict
    from torchrl.modules import set_recurrent_mode

    from adptnet.integrations.torchrl import ADPTModule

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

LAYERS = {
    "layer": lambda: ADPTNet(5, beta=1.0),
    "positions": lambda: ADPTNet(6, rope=drive.RoPE()),
    "stack": lambda: Stack(ADPTNet(5).spec, 2),
    "model": lambda: SequenceModel(ADPTNet(8).spec, depth=2, input_size=5, output_size=3),
    "gru": lambda: Recurrent(cells.GRU(5)),
}


def rollout(features, rows=4, steps=13):
    """Return a tensordict of steps in which some episodes begin."""
    starts = torch.rand(rows, steps, 1) < 0.3
    starts[:2, 0] = True
    starts[2, 0] = False
    return TensorDict({"observation": torch.randn(rows, steps, features), "is_init": starts}, [rows, steps])


def run_step_by_step(module, data, memory=None):
    outputs = []
    for t in range(data.shape[1]):
        step = data[:, t].clone()
        if memory is not None:
            step["memory"] = memory
        step = module(step)
        outputs.append(step["embedding"])
        memory = step["next", "memory"]
    return torch.stack(outputs, 1), memory


def width_of(name):
    return 6 if name == "positions" else 5


@pytest.mark.parametrize("name", LAYERS)
def test_both_modes_agree_values_and_gradients(name):
    torch.manual_seed(0)
    module = ADPTModule(LAYERS[name]().double())
    data = rollout(width_of(name)).double()
    data["is_init"] = data["is_init"].bool()
    memory = torch.randn(4, module.state_size, dtype=torch.float64)
    memory[:, -1] = torch.tensor([3, 0, 7, 2])  # positions
    memory.requires_grad_()
    data["memory"] = memory.unsqueeze(1).expand(-1, data.shape[1], -1)
    alone, last = run_step_by_step(module, data, memory)
    with set_recurrent_mode(True):
        together = module(data.clone())
    assert_close(together["embedding"], alone, rtol=0, atol=1e-12)
    assert_close(together["next", "memory"][:, -1], last, rtol=0, atol=1e-12)
    assert not together["next", "memory"][:, :-1].any()
    wanted = [*module.parameters(), memory]
    for one, other in zip(
        torch.autograd.grad(alone.square().sum(), wanted, allow_unused=True),
        torch.autograd.grad(together["embedding"].square().sum(), wanted, allow_unused=True),
        strict=True,
    ):
        assert (one is None) == (other is None)
        if one is not None:
            assert_close(one, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["layer", "positions"])
def test_an_episode_does_not_see_the_one_before(name):
    module = ADPTModule(LAYERS[name]().double())
    data = rollout(width_of(name)).double()
    data["is_init"] = torch.zeros(4, 13, 1, dtype=torch.bool)
    data["is_init"][:, 6] = True
    with set_recurrent_mode(True):
        whole = module(data.clone())["embedding"][:, 6:]
        alone = module(data[:, 6:].clone())["embedding"]
    assert_close(whole, alone, rtol=0, atol=1e-12)
    stale = data[:, 6].clone()
    stale["memory"] = torch.full((4, module.state_size), 9.0, dtype=torch.float64)
    assert_close(module(stale)["embedding"], alone[:, 0], rtol=0, atol=1e-12)


def test_leading_dimensions_and_single_elements():
    module = ADPTModule(ADPTNet(5), ["seen", ("agent", "memory")], ["out", ("next", "agent", "memory")])
    data = TensorDict(
        {"seen": torch.randn(2, 3, 7, 5), "is_init": torch.zeros(2, 3, 7, 1, dtype=torch.bool)}, [2, 3, 7]
    )
    with set_recurrent_mode(True):
        found = module(data)
    assert found["out"].shape == (2, 3, 7, 5)
    assert found["next", "agent", "memory"].shape == (2, 3, 7, module.state_size)
    flat = data.flatten(0, 1).exclude("out", "next")
    with set_recurrent_mode(True):
        assert_close(module(flat)["out"].reshape(2, 3, 7, 5), found["out"])
    one = module(TensorDict({"seen": torch.randn(5), "is_init": torch.ones(1, dtype=torch.bool)}, []))
    assert one["out"].shape == (5,)


def test_the_state_enters_an_environment():
    from torchrl.envs import CatTensors, InitTracker, StepCounter, TransformedEnv
    from torchrl.envs.utils import check_env_specs
    from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv

    module = ADPTModule(ADPTNet(7))
    env = TransformedEnv(ContinuousActionVecMockEnv(), InitTracker())
    env.append_transform(StepCounter(4))
    env.append_transform(CatTensors(["observation"], "observation", del_keys=False))
    env.append_transform(module.make_tensordict_primer())
    check_env_specs(env)


def test_arguments_that_do_not_fit_are_reported():
    with pytest.raises(InputError, match="got GRU"):
        ADPTModule(torch.nn.GRU(5, 5))
    with pytest.raises(InputError, match="two keys"):
        ADPTModule(ADPTNet(5), ["observation"])
    with pytest.raises(InputError, match="batch_first=True"):
        ADPTModule(ADPTNet(5, batch_first=False))
    with pytest.raises(InputError, match=r"a primer needs the key \('next', 'memory'\)"):
        ADPTModule(ADPTNet(5), out_keys=["out", "memory"]).make_tensordict_primer()
    scalar = TensorDict({"observation": torch.randn(5), "is_init": torch.zeros(1, dtype=torch.bool)}, [])
    with pytest.raises(InputError, match="the tensordict has none"), set_recurrent_mode(True):
        ADPTModule(ADPTNet(5))(scalar)
