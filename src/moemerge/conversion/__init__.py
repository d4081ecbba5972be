"""Change what a model consists of: compose, extract adapters, convert layouts."""
