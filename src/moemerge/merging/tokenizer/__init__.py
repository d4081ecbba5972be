"""The output's tokenizer, and embeddings brought to its vocabulary; from files and tensors alone.

The rules are mergekit's (0.1.5), as its results show them:

* `base`: the base model's vocabulary (the first model's without one). `<model>`: that model's; it
  need not take part in the merge. `union`: the base's, ids kept, then what the others add: first
  the ordinary tokens of each, then the added tokens of each. Tokens named under `tokens:` that
  nobody has come last.
* Each model's embedding (and head) is brought to that vocabulary before the method runs. A token
  which a model lacks gets the row that `tokens:` names; else the base's; else the mean of those
  models that have it; else (`<model>` outside the merge) zero. `force` uses the named row for all.
* A token whose id lies beyond a model's embedding is one that this model lacks (in a union with
  others that have it mergekit fails); the tokenizer that is written does not keep such a token of
  its donor.
* The output has exactly as many rows as tokens, `config.json` says so, and spare rows of an input
  (Qwen's 152064 for 151665) go, unless `pad_to_multiple_of` asks for some: each holds the mean row.
* Without a tokenizer setting, embeddings of unlike size are refused.

Where we differ, on purpose:

* The order of models is the config's, and of a model's tokens that of their ids. mergekit's come
  from hash tables: the same file gives other ids from run to run.
* With `source: base` a new token under `tokens:` gets its row in every model. mergekit takes the
  base's spare row of that number, or fails if there is none.
* Holes in the donor's ids (mergekit: IndexError) are kept and hold the mean row.
* bos/eos/pad ids in `config.json` and `generation_config.json` follow the tokenizer's donor, so
  that generation with `tokenizer_source: <model>` ends where that model's would.
"""
