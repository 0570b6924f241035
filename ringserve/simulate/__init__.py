"""``ringserve simulate``: the scheduler and the KV manager as they are, against a model of step times and a virtual clock."""
