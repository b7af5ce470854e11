"""Recipes: one file per result or family of results, with a mapping `RECIPES`. Every file in this folder is
imported."""
