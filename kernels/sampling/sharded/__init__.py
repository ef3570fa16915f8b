"""
Sampling from logits that ranks share: each has those of some ids, and no rank ever has all.

Given the logits that one rank would have, tokens, margins and logprobs are, bit for bit, those of
`kernels.sampling.reference`: a row's best and its winner are a maximum of integers over all ranks,
and thresholds and log-sum-exps come from sums of integers, which no order changes.

Every call of a rank meets the same calls of all others, with the same arguments but for logits and
shard. How many collectives there are depends on the parameters alone, never on logits: one for
greedy rows, one more for noise, four each for top_k and top_p, one for logprobs.
"""
