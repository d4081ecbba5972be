"""Small models of our own, to show and to test what merging does to routing."""
