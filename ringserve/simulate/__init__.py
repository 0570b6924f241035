"""``ringserve simulate``: the scheduler and the KV manager as they are, on modelled step times and a virtual clock."""
