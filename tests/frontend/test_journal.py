"""The journal: what is kept of a request, and that it can be asked again."""

from __future__ import annotations

from array import array

from ringserve.frontend.journal import Journal
from ringserve.messages.columns import pack_i32
from ringserve.messages.prompts import TextPrompt
from ringserve.messages.requests import GenerateRequest, OutputParams, ResumedChoice
from ringserve.messages.sampling import SamplingParams


def request_of(journal: Journal[str], n: int) -> GenerateRequest:
    return GenerateRequest(journal.new_id(), TextPrompt("a"), SamplingParams(seed=5), OutputParams(), n=n)


def test_ids_name_their_frontend() -> None:
    journal: Journal[str] = Journal(3)
    ids = [journal.new_id() for _ in range(100)]
    assert len(set(ids)) == 100
    assert {each >> 48 for each in ids} == {3}


def test_an_entry_lives_until_the_last_choice_ends() -> None:
    journal: Journal[str] = Journal(0)
    entry = journal.open(request_of(journal, 2), "sink", 0)
    assert (len(journal), journal.choices_in_flight) == (1, 2)
    journal.finish_choice(entry, 1, "stop")
    assert (len(journal), journal.choices_in_flight) == (1, 1)
    journal.finish_choice(entry, 0, "length")
    assert (len(journal), journal.choices_in_flight) == (0, 0)


def test_a_refused_request_is_closed_whole() -> None:
    journal: Journal[str] = Journal(0)
    entry = journal.open(request_of(journal, 3), "sink", 0)
    journal.finish_choice(entry, 0, "stop")
    journal.close(entry)
    assert (len(journal), journal.choices_in_flight) == (0, 0)


def test_a_request_can_be_asked_again_with_what_went_out() -> None:
    journal: Journal[str] = Journal(0)
    request = request_of(journal, 3)
    entry = journal.open(request, "sink", 0)
    entry.choices[0].token_ids = array("i", [7, 8])
    entry.choices[0].characters_sent = 5
    journal.finish_choice(entry, 2, "stop")
    again = entry.resumed_request()
    assert again.resumed == (ResumedChoice(0, pack_i32([7, 8]), 5, None), ResumedChoice(2, b"", 0, "stop"))
    assert (again.request_id, again.prompt, again.sampling) == (request.request_id, request.prompt, request.sampling)
