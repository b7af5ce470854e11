"""Recipes: one file for each result or family of results, with a mapping `RECIPES`. A new file is found by itself."""
