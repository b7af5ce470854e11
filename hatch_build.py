"""Make the links of the README absolute in the metadata of a distribution, where relative ones lead nowhere."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ReadmeHook(MetadataHookInterface):
    """Hatchling calls this hook for the field `readme`, which pyproject.toml declares dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the description to the README with absolute links.

        Args:
            metadata: The project table of pyproject.toml.
        """
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        absolute = make_links_absolute(text, metadata["urls"]["Repository"])
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute}


def make_links_absolute(text: str, repository: str) -> str:
    """Return Markdown with absolute links: images to the raw file, everything else to its page.

    Args:
        text: The Markdown text.
        repository: The address of the repository, without a slash at its end.
    """

    def replace(link: re.Match[str]) -> str:
        kind = "raw" if link[1] else "blob"
        return f"{link[1]}[{link[2]}]({repository}/{kind}/main/{link[3]})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)", replace, text)
