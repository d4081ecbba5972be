"""What a merge did to the routing, measured against the sources."""
