"""Upload of models to the Hugging Face Hub. `adptnet.load("user/name")` downloads them. Needs the extra `hf`."""

import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from ..checkpoint import FILE_NAME, save
from ..errors import InputError

__all__ = ["push_to_hub"]


def push_to_hub(model: nn.Module, repository: str, *, card: str | None = None, private: bool = False) -> str:
    """Upload the weights and the spec of a model, and a card, in one commit.

    The repository is made if it does not exist. Models of `adptnet.integrations.hugging_face` have a method
    `push_to_hub` of their own.

    Args:
        model: A module that `adptnet.save` accepts.
        repository: "user/name". Log in first: `hf auth login`.
        card: The text of README.md; a short description of the spec if None.
        private: Whether a new repository is private.

    Returns:
        The address of the commit.

    Raises:
        CheckpointError: `save` rejects the model.
        InputError: huggingface_hub is not installed.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise InputError("push_to_hub needs huggingface_hub: pip install 'adptnet[hf]'.") from None
    api = huggingface_hub.HfApi(library_name="adptnet")
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder, FILE_NAME))
        Path(folder, "README.md").write_text(_describe(model, repository) if card is None else card, encoding="utf-8")
        api.create_repo(repository, private=private, exist_ok=True)
        commit: Any = api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Upload a model of adptnet"
        )
    return str(commit.commit_url)


def _describe(model: nn.Module, repository: str) -> str:
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"""---
library_name: adptnet
tags: [adptnet, recurrent]
---

# {repository.rpartition("/")[2]}

A `{type(model).__name__}` of adptnet with {count:,} parameters. To load it:

```python
import adptnet

model = adptnet.load("{repository}")
```

Its spec:

```
{model.spec}
```
"""
