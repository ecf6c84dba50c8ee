"""Grids that ship with the package: the paper's tables as named runs. `haav ablate NAME`."""
