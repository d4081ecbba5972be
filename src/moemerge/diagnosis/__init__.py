"""Diagnose the routing of a merge: figures per layer and domain, a verdict, advice."""
