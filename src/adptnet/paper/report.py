"""stub"""
from dataclasses import dataclass
@dataclass(frozen=True)
class Report:
    """x"""
def run(options):
    pass
