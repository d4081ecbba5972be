"""What a merge did to the routing: figures per layer and domain, a verdict, advice."""
