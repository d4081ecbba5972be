"""Several models side by side: opened, their routers paired, streamed over the same tokens."""
