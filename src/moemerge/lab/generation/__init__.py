"""Generate completions for prompts: engines with one protocol, and the journal of completions."""
