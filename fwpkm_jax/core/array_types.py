"""The glossary of dimensions, and aliases for the arrays that several files share.

Dimension names used in every annotation of the package:

  groups     memories kept side by side; sequences of one group share a memory
  batch      sequences (of one group, in `core` and `rules`)
  length     tokens of a sequence
  chunk      tokens of a sequence between two writes
  tokens     all tokens of a group's chunk, flattened: batch * chunk
  heads      independent queries of a token
  top_k      slots read by one head
  places     slots read by one token: heads * top_k
  subkeys    sub-keys of a codebook; a memory has subkeys**2 slots
  half       width of a sub-key: half the key width
  value      width of a slot's value
"""

from jaxtyping import Array, Bool, Float, Int, Num

Queries = Float[Array, "tokens heads key"]
SubKeys = Float[Array, "heads 2 subkeys half"]
ValueTable = Float[Array, "slots value"]
SlotIds = Int[Array, "tokens places"]
SlotWeights = Float[Array, "tokens places"]
TokenValues = Float[Array, "tokens value"]
TokenWeights = Float[Array, " tokens"]
TokenMask = Bool[Array, "batch length"] | Num[Array, "batch length"]
"""1 or True for real tokens, 0 or False for padding; any dtype of numbers."""
