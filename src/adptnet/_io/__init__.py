"""File handling shared by the whole package: atomic writes, bounded reads, and parsers for untrusted files."""
