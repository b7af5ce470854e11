"""Compiling, caching and loading the kernels; the pool of buffers."""

import gc
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import adptnet
from adptnet._io import cache
from adptnet.errors import BuildError, IncompatibleError
from adptnet.ops import _buffers, _build, _sources, _trusted_files
from support.kernels import SOURCES, needs_compiler, run_python

LAYER = "import torch, adptnet; layer = adptnet.ADPTNet.paper(5, beta=1.0); y, _ = layer(torch.randn(2, 7, 5)); "


@needs_compiler
def test_the_first_use_compiles_but_neither_an_import_nor_the_second_use(tmp_path):
    show = "import torch, adptnet; from adptnet.ops.linear_scan import linear_scan; "
    show += (
        "linear_scan(torch.rand(4), torch.randn(2, 5, 4)); print(adptnet.ops._build.load_kernel('linear_scan').reason)"
    )
    code = f"import os, adptnet; print(os.listdir({str(tmp_path)!r})); {show}"
    at_import, first = run_python(code, ADPTNET_CACHE=str(tmp_path))[0].splitlines()
    assert at_import == "[]"
    (library,) = tmp_path.glob("*.so")  # of the operation that was used
    made = library.stat().st_mtime_ns
    second, _ = run_python(show, ADPTNET_CACHE=str(tmp_path), PATH="", CXX="")  # without any compiler
    assert first.startswith(str(library))
    assert "built earlier" in second
    assert library.stat().st_mtime_ns == made


@needs_compiler
def test_two_processes_may_build_concurrently(tmp_path):
    code = "import sys; from adptnet.ops import _build; sys.exit(_build.load('plane_rotation') is None)"
    env = {**os.environ, "ADPTNET_CACHE": str(tmp_path), "PYTHONPATH": str(SOURCES.parent.parent)}
    racers = [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(2)]
    assert [racer.wait(timeout=100) for racer in racers] == [0, 0]
    (library,) = tmp_path.glob("*.so")
    assert sorted(tmp_path.iterdir()) == [library, _trusted_files.record_path(library)]
    assert _trusted_files.find_recorded_fault(library) is None


def test_without_a_compiler_the_reference_runs_with_one_warning(tmp_path):
    code = "import warnings; warnings.simplefilter('always')\n" + LAYER + "layer(torch.randn(1, 2, 5)); "
    alone = {"ADPTNET_BACKEND": "compile", "ADPTNET_CACHE": str(tmp_path), "PATH": "", "CXX": ""}
    output, messages = run_python(code + "print(adptnet.backends())", **alone)
    assert messages.count("BackendWarning: adptnet's compiled kernels are unavailable") == 1
    assert "no C++ compiler. Install one" in messages
    assert "reference: there is no C++ compiler" in output


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'it is Monday' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("ADPTNET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(BuildError, match="it is Monday"):
        _build.build("adpt_scan", "float")
    assert not list((tmp_path / "cache").iterdir())


def test_the_backend_variable_disables_the_kernels(monkeypatch, tmp_path):
    show = LAYER + "print(adptnet.backends()['adpt_scan'])"
    output, messages = run_python(show, ADPTNET_BACKEND="reference", ADPTNET_CACHE=str(tmp_path))
    assert output == "reference: ADPTNET_BACKEND=reference"
    assert "Warning" not in messages
    assert not list(tmp_path.iterdir())
    with monkeypatch.context() as replaced:
        replaced.setattr(os, "environ", {**os.environ, "ADPTNET_BACKEND": "reference"})
        assert not _build.kernels_enabled()
    monkeypatch.setenv("ADPTNET_BACKEND", "gpu")
    with pytest.raises(IncompatibleError, match="must be auto, cpu, compile or reference"):
        adptnet.backends()


def test_a_cache_folder_that_cannot_be_written_is_replaced(tmp_path, monkeypatch):
    monkeypatch.delenv("ADPTNET_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    folder = cache.cache_folder()
    assert folder == cache._temporary_folder()
    assert folder.stat().st_mode & 0o777 == 0o700


@needs_compiler
def test_loading_a_kernel_keeps_denormals():
    assert _build.load("adpt_scan", "double") is not None
    small = torch.tensor(1e-30, dtype=torch.float32)
    assert float(small * 1e-10) > 0
    assert float(torch.full((64,), 1e-300, dtype=torch.float64).mul(1e-15).sum()) > 0


def test_large_buffers_are_reused_and_never_shared():
    first, second = (_buffers.empty(300, 1000, dtype=torch.float64) for _ in range(2))
    address = first.data_ptr()
    assert address != second.data_ptr()
    view = first[3]
    del first
    third = _buffers.empty(300, 1000, dtype=torch.float64)
    assert third.data_ptr() != address  # the view keeps it
    del view
    gc.collect()
    assert _buffers.empty(300, 1000, dtype=torch.float64).data_ptr() == address
    assert address % 64 == 0


def test_a_forked_child_does_not_share_buffers():
    shared = _buffers.empty(300, 1000, dtype=torch.float64).fill_(1.0)  # large enough for pages of its own
    child = os.fork()
    if child == 0:
        shared.fill_(2.0)
        os._exit(0)
    os.waitpid(child, 0)
    assert bool((shared == 1.0).all())


@pytest.mark.parametrize("rows", [3, 300])
def test_buffers_are_on_the_cpu_whatever_the_default_device(rows):
    with torch.device("meta"):
        assert _buffers.empty(rows, 1000, dtype=torch.float32).device.type == "cpu"


def test_released_blocks_are_reused():
    for size in (1000, 3_000_000):
        first, second = _buffers.acquire(size), _buffers.acquire(size)
        assert first.address != second.address
        assert first.address % 64 == 0
        assert size <= first.size == len(first.memory) <= 2 * size
        _buffers.release(first)
        assert _buffers.acquire(size) is first  # the last one released


PROGRAMS = {
    "adpt_scan": """
from adptnet.ops.adpt_scan import Factors, cpu
for size, batch in ((1, 1), (13, 3), (12, 7)):
    for variant in VARIANTS.values():
        heads, phased = variant.get("heads", 1), "phased" in variant
        if size % heads or (phased and size // heads % 2):
            continue
        for pairs in (False, True)[: 2 - size % 2]:
            drive, state, constants, form = make_problem(batch, 67, size, pairs=pairs, **variant)  # more than 64 rows
            reset, lengths = torch.rand(batch, 67) < 0.3, torch.randint(1, 68, (batch,))
            choices = [Factors()]
            if form.rotates and not form.directions_in_drive and form.planes == 1 and not form.whole_state:
                choices += [make_factors(size // form.heads, form.heads, 3, (1, size // form.heads))[0]]
            for save, factors in itertools.product((False, True), choices):
                inputs = (drive, state, *constants, reset, lengths, *factors)
                plan = cpu.make_plan(inputs, form)
                results = cpu.forward(plan, inputs, save)
                cpu.backward(plan, torch.randn_like(results[0]), inputs, *results, needed=[True] * len(inputs))
""",
    "adpt_step": """
from adptnet.ops.adpt_step import Jacobians, newton_pass
from adptnet.ops.tolerance import Tolerance
for size, batch in ((1, 1), (13, 3), (16, 2)):
    _, start, constants, form = make_problem(batch, 1, size)
    states, drive = (torch.randn(batch, 37, size) for _ in range(2))
    Jacobians(states, constants, form)(0, 21)
    for reset in (None, torch.rand(batch, 37) < 0.3):
        for tiles in (None, 1, 8):
            arguments = (states, drive, start, start, reset, constants, form)
            recent = None if reset is None else torch.rand(batch, size)
            options = {"recent": recent, "tiles": tiles, "complete": tiles != 8}
            newton_pass(*arguments, diagonal=tiles != 1, tolerance=Tolerance(0.0, 1e-6), **options)
""",
    "matrix_chain": """
from adptnet.ops.matrix_chain import cpu
for batch, size, count in ((1, 1, 1), (3, 13, 5), (1, 33, 40), (2, 64, 64)):
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        cpu.matrix_chain(torch.randn(batch, 30, size, size), torch.randn(batch, size, count))
""",
    "plane_rotation": """
from adptnet.ops.plane_rotation import cpu
for rows, size in ((1, 1), (3, 13), (2, 64), (5, 97)):
    for threads in (1, 2):
        torch.set_num_threads(threads)
        inputs = [torch.randn(rows, size) for _ in range(3)] + [torch.randn(rows, 1) for _ in range(3)]
        cpu.backward(cpu.forward(*inputs), *inputs)
""",
    "linear_scan": """
from adptnet.ops.linear_scan import cpu
for size in (1, 3, 4, 13, 50):
    for dtype in (torch.get_default_dtype(), torch.get_default_dtype().to_complex()):
        offset, initial = (torch.randn(*shape, dtype=dtype) for shape in ((3, 37, size), (3, size)))
        for shape in ((size,), (37, size), (3, 1, size)):
            for reverse, reset in ((False, None), (True, torch.rand(3, 37) < 0.3)):
                factors = torch.randn(*shape, dtype=dtype) / 9
                states = cpu.forward(factors, offset, initial, reset, reverse)
                cpu.backward(offset, states, factors, initial, reset, reverse, needs_transition_grad=True)
                cpu.forward(factors, offset.clone(), None, reset, reverse, overwrite=True)
""",
}
RACE = """
from adptnet.ops.linear_scan import cpu
rows = torch.randn(1, 37, 50).expand(4, 37, 50)  # rows that share memory
cpu.forward(torch.randn(50), rows, None, None, False, overwrite=True)
"""
SANITIZED_PROCESS = """
import ctypes, itertools, sys, threading
import torch
from adptnet.ops import _build
_build._loaded[{operation!r}, {scalar!r}] = _build.Kernel(ctypes.CDLL({library!r}), "")
torch.set_default_dtype(dict(float=torch.float32, double=torch.float64)[{scalar!r}])
from support.kernels import VARIANTS, make_factors, make_problem
from adptnet.ops.{operation} import cpu
def run():
    exec({program!r}, dict(globals()))
if {threads} > 1:
    cpu.MIN_WORK_PER_THREAD = 1  # several threads even for the smallest call
torch.set_num_threads({threads})
callers = [threading.Thread(target=run) for _ in range({threads} - 1)]
for caller in callers:
    caller.start()
run()
for caller in callers:
    caller.join()
print("ended")
"""


def run_with_sanitizer(operation, program, folder, *, sanitizer="address", scalar="double", threads=1, flags=()):
    """Run a program with a sanitized kernel in several threads; return its exit code and its output."""
    compiler = _build.find_compiler()
    runtime = f"lib{sanitizer[0]}san.so"
    runtime = subprocess.run([*compiler, f"-print-file-name={runtime}"], capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(runtime):
        pytest.skip(f"the compiler has no {sanitizer} sanitizer")
    checks = {"address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"], "thread": ["-fsanitize=thread"]}
    library = folder / f"{operation}.so"
    shared_flags = [*_sources.compile_flags(operation), *_build.PLATFORM_FLAGS]
    shared_flags.remove("-O2")
    command = [*compiler, *shared_flags, *flags, *checks[sanitizer], "-O1", "-g1", f"-DSCALAR={scalar}"]
    source = SOURCES / operation / "csrc" / "kernel.cpp"
    subprocess.run([*command, "-o", library, source], check=True, capture_output=True)
    code = SANITIZED_PROCESS.format(
        operation=operation,
        scalar=scalar,
        library=str(library),
        program=program,
        threads=threads,
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(SOURCES.parents[1]), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        ),
        "ADPTNET_BACKEND": "auto",
        "LD_PRELOAD": runtime,
        "OMP_NUM_THREADS": "1",
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself leaks
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1 exitcode=66",
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if "ThreadSanitizer: unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not support the address randomisation of this system (vm.mmap_rnd_bits)")
    return done.returncode, done.stdout + done.stderr


# Compiling adpt_scan with the sanitizers takes half a minute.
@needs_compiler
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "operation", [pytest.param(name, marks=[pytest.mark.slow] * (name == "adpt_scan")) for name in PROGRAMS]
)
def test_address_and_undefined_behaviour_sanitizers_find_nothing(operation, tmp_path):
    assert run_with_sanitizer(operation, PROGRAMS[operation], tmp_path) == (0, "ended\n")


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.parametrize("scalar", _build.SCALAR_TYPES)
@pytest.mark.parametrize("operation", PROGRAMS)
def test_sanitizers_find_nothing_in_several_threads(operation, scalar, sanitizer, tmp_path):
    """Use the instruction set of this processor, and three Python threads with three kernel threads each."""
    settings = {"sanitizer": sanitizer, "scalar": scalar, "threads": 3, "flags": _build.instruction_set()}
    assert run_with_sanitizer(operation, PROGRAMS[operation], tmp_path, **settings) == (0, "ended\n")


@needs_compiler
@pytest.mark.slow
def test_the_thread_sanitizer_finds_a_race_that_is_there(tmp_path):
    code, messages = run_with_sanitizer("linear_scan", RACE, tmp_path, sanitizer="thread", threads=3)
    assert code == 66
    assert "WARNING: ThreadSanitizer: data race" in messages


FORKS = """
import os, signal, threading
import torch
from adptnet.ops.linear_scan import cpu

torch.set_num_threads(3)
cpu.MIN_WORK_PER_THREAD = 1  # several threads even for the smallest call
factors, offset = torch.rand(64), torch.randn(8, 128, 64)  # large enough for the pool
expected = cpu.forward(factors, offset, None, None, False).numpy()
ended = threading.Event()

def run():
    while not ended.is_set():
        cpu.forward(factors, offset, None, None, False)

threads = [threading.Thread(target=run) for _ in range(6)]
for thread in threads:
    thread.start()
codes = []
for _ in range(30):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        found = [cpu.forward(factors, offset, None, None, False).numpy() for _ in range(3)]
        os._exit(not all((one == expected).all() for one in found))
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
ended.set()
for thread in threads:
    thread.join()
print(set(codes))
"""


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_forked_while_threads_run_kernels_can_run_them_too():
    """The kernels hold no lock across a fork. Torch's own threads do not survive one, and are not used here."""
    assert run_python(FORKS)[0] == "{0}"


RESIDENT = """
import random, sys
import torch
import adptnet
from adptnet import solvers
from adptnet.ops.linear_scan import linear_scan

def resident():  # in MB
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 1e6

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
random.seed(0)
layers = {size: adptnet.ADPTNet.paper(size, beta=0.3) for size in (3, 8, 17, 32)}
deer = solvers.DEER(max_iterations=20)

def call(subject):
    size, layer = random.choice(list(layers.items()))
    x = torch.randn(random.randint(1, 6), random.randint(1, 250), size, requires_grad=True)
    if subject == 0:
        layer(x)[0].sum().backward()
    elif subject == 1:
        linear_scan(torch.rand(size, requires_grad=True), x).sum().backward()
    else:
        deer(layer.cell, x[:, :40]).states.sum().backward()
    layer.zero_grad()

count = int(sys.argv[1])
for i in range(count // 5):
    call(i % 3)
before = most = resident()
for i in range(count):
    call(i % 3)
    most = max(most, resident()) if i % 50 == 0 else most
print(before, max(most, resident()) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_memory_does_not_grow_with_calls_of_changing_size(count):
    """Run a layer, a scan and a solver in turn, forward and backward: at most 10 MB more after the first fifth."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCES.parent.parent), "ADPTNET_BACKEND": "auto"}
    command = [sys.executable, "-c", RESIDENT, str(count)]
    shown = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert float(shown.split()[1]) <= 10, shown


FAULTS = """
import resource, sys
import torch
from adptnet.ops import _buffers

if "keep" in sys.argv:
    _buffers.keep_freed()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for _ in range(6):  # until the heap has settled, whose addresses are random
    torch.ones(2**24), torch.ones(2**21)
before = faults()
for _ in range(5):
    torch.ones(2**24), torch.ones(2**21)
print(faults() - before)
"""


@pytest.mark.skipif(not platform.libc_ver()[0].startswith("glibc"), reason="settings of glibc's allocator")
def test_keep_freed_avoids_page_faults():
    """Five times 64 MiB cause tens of thousands of page faults if memory is mapped anew, and few if it is kept."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}

    def faults(*arguments):
        command = [sys.executable, "-c", FAULTS, *arguments]
        return int(subprocess.run(command, env=clean, check=True, capture_output=True, text=True).stdout)

    assert 10 * faults("keep") < faults()
