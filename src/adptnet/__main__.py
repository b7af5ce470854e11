"""Run the installed command `adptnet` as `python -m adptnet`, for launchers such as torchrun that need a module."""

import importlib.metadata
import sys

if __name__ == "__main__":
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="adptnet")
    sys.exit(command.load()())
