"""The page and its server: `haav serve`."""
