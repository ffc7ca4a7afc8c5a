"""Faults that the protocol once had, or could well have, put back in: what notices each, its file, and both texts.

What notices it is the seed of a schedule, or the name of a case; ``recording.py`` looks for it.
"""

from sources import Mutant

PAST = {
    "waits for a store that is stopped": (113, Mutant("rules", "PATIENCE = 0.5", "PATIENCE = 500.0")),
    "tells nobody of Ctrl-C at the beginning of a call": (
        69,
        Mutant(
            "rules",
            "return not is_shared and (self.is_awaited or not is_exception)",
            "return not is_shared and (self.is_awaited or (not is_exception and not self.is_fresh))",
        ),
    ),
    "tells nobody of Ctrl-C while it meets": (
        96,
        Mutant(
            "monitor",
            "            self.interrupted(error)\n\n    def interrupted",
            "            self.phase % 2 or self.interrupted(error)\n\n    def interrupted",
        ),
    ),
    "tells nobody of Ctrl-C in a wait": (
        3,
        Mutant(
            "monitor",
            "self.give_up(self._own(text), INTERRUPT, wait)",
            "self.is_awaited or self.give_up(self._own(text), INTERRUPT, wait)",
        ),
    ),
    "does not check whether others have given up before it takes what they sent": (
        71,
        Mutant("rules", "        return now - before", "        return 0.0"),
    ),
    "does not count the time in which it was stopped at the end of the last call": (
        5166641,
        Mutant("rules", "self._exchanged = self._exchanged, self._began", "self._exchanged = self._exchanged, now"),
    ),
    "believes the wall clock": (
        "reports_of_other_hosts_are_read_if_somebody_may_have_given_up",
        Mutant("rules", "return seems_late or apart > LISTEN_EVERY or now - self._began > APART", "return seems_late"),
    ),
    "raises a loss from a later call of two in a call of all": (
        "who_knows_of_a_loss_in_a_later_call_of_two_has_sent_what_it_had_not_given_up",
        Mutant(
            "rules",
            "        if report is None or not report.is_final:",
            "        if report is None or not report.is_final or report.peer is not None:",
        ),
    ),
    "sends in a call of two what the other rank takes for later": (
        "a_call_of_two_ends_with_the_call_of_all_that_its_rank_has_missed",
        Mutant("protocol", "if is_between or not self.was_interrupted:", "if not self.was_interrupted:"),
    ),
    "does not notice that the store falls silent at its last look": (
        38651,
        Mutant("monitor", "(was_cut_off or self._is_cut_off)", "was_cut_off"),
    ),
    "counts time in bodies while it cannot find out why a connection broke": (
        1148252,
        Mutant("monitor", "if is_cut_off and self._waits_for_a_body(list(self.peers)):", "if False:"),
    ),
    "explains a broken connection by the last report of each rank alone": (
        "a_broken_connection_is_explained_by_logged_reports_too",
        Mutant("monitor", "        for report in logged:  #", "        for report in ():  #"),
    ),
    "replaces the last report of the log": (
        191,
        Mutant("status", "self.log(_LOG).append(store, self.rank, report)", 'store.set(f"{_LOG}/1", report)'),
    ),
    "reports on its page only once it has met the others": (
        400,
        Mutant("status", "is_unknown = not self._exchanged", "is_unknown = False"),
    ),
    "passes an interrupt on as another error": (
        "an_interrupt_that_is_passed_on_stays_one",
        Mutant(
            "status",
            "error.is_earlier, error.is_reported = cause.is_earlier, True",
            "error.is_earlier, error.is_reported, error.is_interrupt = cause.is_earlier, True, False",
        ),
    ),
    "meets ranks that are in earlier calls": (
        "who_is_in_an_earlier_call_has_not_come",
        Mutant(
            "protocol",
            "elif min(one.at for one in others.values()) < told.at:",
            "elif min(one.at for one in others.values()) < 0:",
        ),
    ),
    "does not hear who gives up while others reconnect": (
        "who_takes_the_others_number_raises_what_ends_that_call",
        Mutant("rules", "if is_reconnecting and is_earlier:", "if is_reconnecting:"),
    ),
    "does not know that it may have missed a call by Ctrl-C": (
        87,
        Mutant("rules", "return self.was_interrupted and not self._has_followed", "return False"),
    ),
    "raises what ends the call whose number it has taken only as an earlier error": (
        "who_takes_the_others_number_raises_what_ends_that_call",
        Mutant("rules", "return self.was_interrupted and not self._has_followed", "return self.was_interrupted"),
    ),
    "breaks a later wait": (
        13,
        Mutant("rules", "if self.broken is not None or wait not in (None, self.waits):", "if self.broken is not None:"),
    ),
    "raises what is earlier": (
        12,
        Mutant(
            "rules",
            "return Cause(Why.REPORTED, heard.rank, report, is_earlier)",
            "return Cause(Why.REPORTED, heard.rank, report)",
        ),
    ),
    "takes calls of two for the next of all": (
        135,
        Mutant(
            "rules",
            "return self.number + 0.5 if self._deadline == NOT_IN_TIME else self.at",
            "return float(self.number + (self._partner is not None))",
        ),
    ),
    "counts calls of two": (
        1,
        Mutant(
            "rules",
            "            self.at = self.number + 0.5\n",
            "            self.number += 1\n            self.at = self.number + 0.5\n",
        ),
    ),
    "goes on behind the others": (
        "a_call_of_two_ends_with_the_call_of_all_that_its_rank_has_missed",
        Mutant(
            "protocol",
            "            if is_between or not self.was_interrupted:\n                yield Step(Do.GIVE_UP)",
            "            if is_between or not self.was_interrupted:\n                pass",
        ),
    ),
    "remembers reports from before the ranks have reconnected": (
        "a_report_from_before_the_ranks_reconnected_is_over",
        Mutant("rules", "return report.phase >= self.phase\n", "return True\n"),
    ),
    "ignores who left the meeting when others were connected": (
        "a_report_from_before_the_ranks_reconnected_is_over",
        Mutant("rules", "if report.phase == self.phase - 1 and self._met:", "if False:"),
    ),
    "stays in its phase": (206, Mutant("protocol", "if replies is not None and replies.is_passed:", "if False:")),
    "takes a final report for one about its call only": (
        "who_leaves_for_good_has_sent_what_it_had_not_given_up",
        Mutant(
            "rules",
            "return None if heard.is_ours is False else Cause",
            "return None if heard.is_ours is False or report.number != self.at else Cause",
        ),
    ),
    "counts the time until a silent store answers as time in which a report could have come": (
        5034678,
        Mutant("rules", "                deadline = NOT_IN_TIME\n", "                deadline = now + grace\n"),
    ),
    "loses who cannot be heard": (
        "a_broken_connection_waits_for_a_silent_store_only_while_a_call_has_time",
        Mutant("rules", "if is_cut_off and self._deadline != NOT_IN_TIME:", "if False:"),
    ),
    "waits for a silent store where no call has a limit": (
        "a_broken_connection_waits_for_a_silent_store_only_while_a_call_has_time",
        Mutant("rules", "if is_cut_off and self._deadline != NOT_IN_TIME:", "if is_cut_off:"),
    ),
    "takes no time left for no limit": (
        "connecting_has_a_limit",
        Mutant(
            "protocol",
            "min(max((self._ends_at - now) / 2, SHORTEST), CONNECTED)",
            "min(max(0.0, (self._ends_at - now) / 2) or CONNECTED, CONNECTED)",
        ),
    ),
    "does not count the calls between two ranks": (
        "a_call_of_two_that_the_other_had_left_is_known",
        Mutant("rules", "self._turns[peer] = self._turns.get(peer, 0) + is_turn", "self._turns[peer] = 1"),
    ),
    "counts the calls between two ranks since the last call of all ranks only": (
        "a_message_before_a_call_of_all_ranks_is_a_call_after_it_for_the_other_rank",
        Mutant("rules", "self._before = begun if self.broken is None else None", "self._before = {}"),
    ),
    "counts messages over connections that it has lost": (
        "what_a_rank_had_begun_before_it_gave_up_counts_no_more",
        Mutant("rules", "self._before = begun if self.broken is None else None", "self._before = begun"),
    ),
    "does not know what had begun before it met the others": (
        "what_a_rank_had_begun_before_it_gave_up_counts_no_more",
        Mutant("protocol", "            self._before = {}\n", "            pass\n"),
    ),
    "forgets what had begun before when it meets the others in a call of two": (
        "what_a_rank_had_begun_before_it_gave_up_counts_no_more",
        Mutant(
            "protocol",
            "        if self._partner is None:\n            self._before",
            "        if True:\n            self._before",
        ),
    ),
    "takes what it has begun for what it had begun before a call that it has not made": (
        "who_counts_a_call_that_it_has_not_made_does_not_know_what_came_before",
        Mutant(
            "rules",
            "            self._turns.clear()\n            self._before = None\n",
            "            self._turns.clear()\n",
        ),
    ),
    "fails alone": (
        14,
        Mutant("rules", "return not is_shared and (self.is_awaited or not is_exception)", "return not is_exception"),
    ),
    "takes a rank that gave the call up, and then left, for one that has finished it": (
        "who_leaves_for_good_has_sent_what_it_had_not_given_up",
        Mutant("rules", "return _since(report) > self.at and", "return report.number > self.at and"),
    ),
    "loses a rank that left at the first look": (
        "a_call_of_two_waits_longer_for_a_rank_that_has_left",
        Mutant("rules", "_LOOKS, _LOOKS_OF_TWO = 2, 5", "_LOOKS, _LOOKS_OF_TWO = 1, 5"),
    ),
    "does not hear of a rank that has left": (
        "a_call_of_two_waits_longer_for_a_rank_that_has_left",
        Mutant(
            "rules",
            "Why.LOST if heard.has_ended else Why.LEFT if heard.has_left and not self.is_promised else None",
            "Why.LOST if heard.has_ended else None",
        ),
    ),
    "comes to a call that was left": (
        "a_call_of_two_that_the_other_had_left_is_known",
        Mutant(
            "protocol",
            "return number > self.number or (number == self.number and other.partner is not None and is_left)",
            "return False",
        ),
    ),
    "does not say since when it has not come back": (
        "a_rank_says_since_when_it_has_not_come_back",
        Mutant("rules", "self._turn, self._meetings, self._left_at\n", "self._turn, self._meetings, None\n"),
    ),
    "says that it has not come back since the last call that it gave up": (
        "a_rank_says_since_when_it_has_not_come_back",
        Mutant("rules", "self.number_of_report if self._left_at is None else self._left_at", "self.number_of_report"),
    ),
    "meets who has left": (
        "who_has_left_the_meeting_has_to_come_back",
        Mutant("protocol", "one if one.meetings > self._over.get(rank, 0) else NOTHING for", "one for"),
    ),
    "waits for a leaver's posted messages as if it had posted none": (
        "a_message_that_has_been_posted_arrives_from_a_rank_that_has_left",
        Mutant("rules", "if heard.has_left and not self.is_promised else None", "if heard.has_left else None"),
    ),
    "waits for data of a leaver by the numbers of calls alone": (
        "a_wait_that_needs_more_of_a_rank_that_has_left_is_in_vain",
        Mutant("rules", "        if heard.blocks:\n", "        if False:\n"),
    ),
    "counts time in bodies": (
        "the_time_in_a_body_does_not_count",
        Mutant("rules", "self._extended = now + self._limit", "pass"),
    ),
    "connects those who have come in different meetings": (
        "who_has_come_in_another_meeting_connects_elsewhere",
        Mutant("reconnecting", 'return f"{phase}/{met[0].at}/{meetings}"', 'return f"{phase}/{met[0].at}"'),
    ),
    "forgets why it was broken": (
        "a_meeting_that_fails_leaves_the_group_broken",
        Mutant("reconnecting", "monitor.broken = monitor.broken or broken", "pass"),
    ),
    "does not see the end of a rank that it has not met": (
        "a_rank_that_has_announced_itself_is_observed",
        Mutant("reconnecting", "for rank in unknown if rank in who", "for rank in ()"),
    ),
    "connects for as long as the others wait": (
        "connecting_has_a_limit",
        Mutant("protocol", "(self._ends_at - now) / 2", "self._ends_at - now"),
    ),
    "observes only those who have not come to a meeting": (
        "ranks_that_meet_observe_those_that_have_come",
        Mutant("monitor", "self.peers.values() if self.phase % 2 else self._unfinished", "self._unfinished"),
    ),
    "connects to ranks that have ended": (
        "nobody_connects_to_a_rank_that_has_ended",
        Mutant("protocol", "elif self._looks:", "elif False:"),
    ),
    "does not ask for the younger group": (
        "a_wait_in_shared_memory_is_one_of_the_younger_group_in_its_calls",
        Mutant("monitor", "younger.guard(awaited, waited, is_exact)", "pass"),
    ),
    "waits for who has left the elder group": (
        "who_has_left_the_elder_group_for_good_does_not_come_to_this_one",
        Mutant("status", "return dataclasses.replace(report, number=0.0) if is_last else None", "return None"),
    ),
}
