"""Settings of every test: float64, one thread, NaN-filled new memory, shapes checked at each call."""

import jaxtyping

# Before adptnet is imported anywhere.
hook = jaxtyping.install_import_hook(["adptnet", "adptnet_lab"], "support.typechecks.checker")

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
