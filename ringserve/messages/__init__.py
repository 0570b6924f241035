"""The vocabulary of the four processes: ``rings`` says what travels where, the other modules have a subject each.

    requests, prompts, sampling     a request on its way to the scheduler
    sessions, tokenization          other questions, and their answers
    integrity
    steps                           scheduler and executor
    token_outputs, text_outputs     a step's results on their way back
    logprobs, stats                 parts of them
    startup                         what is told while the server starts
    structs, columns                what all of them are made of

Messages are columns where there is one entry for each sequence of a step. Every ``*_ns`` field is
``time.monotonic_ns()`` of the process named beside it; one machine, one clock. Names are imported from the module that
has them.

Nothing here knows a transport, HTTP or a model.
"""
