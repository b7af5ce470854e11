"""File handling shared by the whole package: atomic writes, bounded reads, untrusted files, the cache."""
