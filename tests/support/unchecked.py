"""Tests of compilers and tracers, which do not work under the run-time type checker of the test suite.

    python tests/support/unchecked.py JOB:KIND...

runs each job on a kind of layer, named as in members.py, and stops at the first failure.
"""

import copy
import io
import os
import sys
import tempfile
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

import adptnet as adpt
from adptnet.errors import IncompatibleError
from adptnet.nn.block import Norm
from support.members import KIND_WIDTH, all_kinds

STEPS, BATCH = 6, 3


def inputs(**options):
    return torch.randn(BATCH, STEPS, KIND_WIDTH, **options)


def lengths():
    return torch.tensor([6, 3, 1])


def compile_options(make):
    """`lengths` and `reset` cause no graph break."""
    model, x = make().eval(), inputs()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for given in ({"lengths": lengths()}, {"reset": torch.rand(BATCH, STEPS) < 0.3}):
        assert_close(compiled(x, **given)[0], model(x, **given)[0])


def compile_fully(make):
    """A compiled model gives the results and gradients of the eager one."""
    model, x = make().eval(), inputs(requires_grad=True)
    compiled = torch.compile(model, fullgraph=True)
    for given in ({}, {"lengths": lengths()}):
        y, expected = compiled(x, **given)[0], model(x, **given)[0]
        assert_close(y, expected)
        sources = [x, *model.parameters()]
        found = torch.autograd.grad(y.square().sum(), sources, allow_unused=True)
        wanted = torch.autograd.grad(expected.square().sum(), sources, allow_unused=True)
        for one, two in zip(found, wanted, strict=True):
            assert_close(torch.zeros(()) if one is None else one, torch.zeros(()) if two is None else two)


def compile_steps(make):
    """`dt` and `beta` cause no graph break."""
    layer, x = make(), inputs()
    given = {"dt": torch.rand(BATCH, STEPS) + 0.5, "beta": torch.rand(BATCH)}
    assert_close(torch.compile(layer, fullgraph=True, backend="eager")(x, **given)[0], layer(x, **given)[0])


def compile_hooks(make):
    """A compiled layer calls the hook of K as the eager one does."""
    layer, x = make(), inputs()
    plain = layer(x)[0]
    layer.cell.directions[0].key_projection.register_forward_hook(lambda module, given, made: made.cumsum(-1))
    hooked = layer(x)[0]
    assert not torch.allclose(hooked, plain)
    assert_close(torch.compile(layer, fullgraph=True, backend="eager")(x)[0], hooked)


def compile_batch_norm(_):
    """Batch statistics exclude padding under `torch.compile`, too."""
    for momentum in (0.1, None):
        for training_mode in (True, False):
            torch._dynamo.reset()
            norm = Norm("batch", KIND_WIDTH).train(training_mode)
            norm.norm.momentum = momentum
            nn.init.normal_(norm.norm.weight)
            twin, x = copy.deepcopy(norm), inputs()
            keep = torch.arange(STEPS) < lengths().unsqueeze(-1)
            for _ in range(2):
                assert_close(torch.compile(twin, fullgraph=True, backend="eager")(x, keep), norm(x, keep))
            assert_close(twin.state_dict(), norm.state_dict())
    torch._dynamo.reset()
    norm, one = torch.compile(Norm("batch", KIND_WIDTH), fullgraph=True, backend="eager"), torch.zeros(2, 3).bool()
    one[0, 1] = True
    with pytest.raises(RuntimeError, match="at least two valid steps"):
        norm(torch.randn(2, 3, KIND_WIDTH), one)


class Streaming(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, state, lengths):
        return self.model(x, state, lengths=lengths)


def export_dynamically(make):
    """An exported program with dynamic batch size takes a state and lengths."""
    model = Streaming(make()).eval()
    entering = model.model(inputs())[1]
    state = entering.detach()
    batch = torch.export.Dim("batch", min=2)
    tree = torch.utils._pytree
    rows = [{0: batch}] * len(tree.tree_leaves(state))
    shapes = tree.tree_unflatten(rows, tree.tree_structure(state))
    shapes = list(shapes) if isinstance(shapes, adpt.nn.LayerStates) else shapes
    dynamic = {"x": {0: batch}, "state": shapes, "lengths": {0: batch}}
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (inputs(), state, lengths()), dynamic_shapes=dynamic), file)
    file.seek(0)
    given = torch.randn(4, STEPS, KIND_WIDTH), state.select([0, 1, 2, 0]), torch.tensor([6, 1, 5, 2])
    assert_close(torch.export.load(file).module()(*given)[0], model(*given)[0])


def trace_root(make):
    """Tracing a layer as the root module raises an error with advice."""
    with pytest.raises(IncompatibleError, match="Trace the model that contains it"):
        torch.fx.symbolic_trace(make())


def package(make):
    """A package compiled ahead of time (AOTInductor) gives the results and the state of the eager model."""
    model, x = make().eval(), inputs()
    with tempfile.TemporaryDirectory() as folder:
        program = torch.export.export(model, (x,))
        path = torch._inductor.aoti_compile_and_package(program, package_path=os.path.join(folder, "model.pt2"))
        y, state = torch._inductor.aoti_load_package(path)(x)
    expected, after = model(x)
    assert_close(y, expected)
    assert type(state) is type(after)
    tree = torch.utils._pytree
    for one, two in zip(tree.tree_leaves(state), tree.tree_leaves(after), strict=True):
        assert_close(one, two)


def distribute(make, wrap):
    """Two processes that share a batch take the optimizer step that one process takes on the whole batch."""
    torch.manual_seed(0)
    model = make()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()  # its statistics would be those of each part
    alone = copy.deepcopy(model)
    x = torch.randn(4, STEPS, KIND_WIDTH)
    shared = wrap(model)
    for trained, part in ((alone, x), (shared, x.chunk(2)[dist.get_rank()])):
        optimizer = torch.optim.AdamW(adpt.optim.param_groups(trained, lr=1e-2, weight_decay=0.1))
        for _ in range(2):
            optimizer.zero_grad()
            trained(part)[0].square().mean().backward()
            optimizer.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in shared.parameters()]
    for one, two in zip(whole, alone.parameters(), strict=True):
        assert_close(one, two)
    assert_close(shared(x)[0], alone(x)[0])


def shard(model):
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if module is not model and isinstance(module, adpt.nn.ResidualBlock):
            fully_shard(module)
    return fully_shard(model)


jobs = {
    "options": compile_options,
    "fully": compile_fully,
    "steps": compile_steps,
    "hooks": compile_hooks,
    "batch norm": compile_batch_norm,
    "dynamic": export_dynamically,
    "root": trace_root,
    "package": package,
    "ddp": partial(distribute, wrap=partial(nn.parallel.DistributedDataParallel, find_unused_parameters=True)),
    "fsdp": partial(distribute, wrap=shard),
}


def run(tasks):
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for task in tasks:
        job, name = task.split(":")
        torch._dynamo.reset()
        torch.manual_seed(0)
        print(task, flush=True)
        try:
            jobs[job](all_kinds[name])
        except Exception as error:
            error.add_note(task)
            raise


def run_in_group(rank, meeting, tasks):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    try:
        run(tasks)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1].startswith(("ddp", "fsdp")):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(run_in_group, (os.path.join(folder, "meet"), sys.argv[1:]), nprocs=2)
    else:
        run(sys.argv[1:])
