"""Faults drawn by ``drawing.py``: what notices each, as in ``protocol_mutants``; and those that nothing notices.

``EQUIVALENT`` says why a fault changes nothing. ``UNNOTICED`` may change something.
"""

# ruff: noqa: E501 - the texts are lines of the sources

from sources import Mutant

DRAWN = [
    (
        "a_rank_that_is_not_known_may_be_ahead_only_while_all_reconnect",
        Mutant(
            "rules",
            "        is_ours = is_reconnecting or report.number < self.at + 1 if heard.is_ours is None else heard.is_ours",
            "        is_ours = report.number < self.at + 1 if heard.is_ours is None else heard.is_ours",
        ),
    ),
    (
        1,
        Mutant(
            "rules",
            "        return None if self._deadline == NOT_IN_TIME else max(0.0, self._ends_at - now)",
            "        return None if self._deadline == NOT_IN_TIME else min(0.0, self._ends_at - now)",
        ),
    ),
    (
        "who_has_ended_with_an_exception_has_sent_what_it_had_finished",
        Mutant(
            "rules",
            "        return heard.has_finished and (report.left is None or report.left > self.at)",
            "        return (report.left is None or report.left > self.at)",
        ),
    ),
    (
        145,
        Mutant(
            "rules",
            "        self._listen_at = now + LISTEN_EVERY\n        return True",
            "        self._listen_at = now + LISTEN_EVERY\n        return False",
        ),
    ),
    (
        1,
        Mutant(
            "rules",
            "        return None if self._deadline == NOT_IN_TIME else max(0.0, self._ends_at - now)",
            "        return None",
        ),
    ),
    (
        357,
        Mutant(
            "rules",
            "        return report.kind == INTERRUPT and report.number == self.at and not self._is_of_others(report)",
            "        return report.kind == INTERRUPT and report.number == self.at",
        ),
    ),
    (
        "an_interrupt_in_this_call_hinges_on_signals",
        Mutant(
            "rules",
            "        return report is not None and self._is_interrupt_of_this_call(report)",
            "        return None",
        ),
    ),
    (
        "a_report_about_this_call_is_not_about_an_earlier_one",
        Mutant(
            "rules",
            "        return report.number < self.at or (report.number == self.at and self._is_of_others(report))",
            "        return report.number < self.at or (report.number == self.at or self._is_of_others(report))",
        ),
    ),
    (
        "a_call_may_have_missed_a_report_after_ctrl_c_or_a_pause",
        Mutant(
            "rules",
            "        return self.broken is None and (self.was_interrupted or now - self._ended > IDLE)",
            "        return self.broken is not None and (self.was_interrupted or now - self._ended > IDLE)",
        ),
    ),
    (
        135,
        Mutant(
            "rules",
            "        return {report.by, report.peer} != {self.rank, self._partner} or self._turn.after(report.turn) > 0",
            "        return None",
        ),
    ),
    (
        "connecting_has_a_limit",
        Mutant(
            "rules",
            "        return self._deadline if self._is_limit_given else max(self._deadline, self._extended)",
            "        return self._deadline if self._is_limit_given else min(self._deadline, self._extended)",
        ),
    ),
    (
        "a_report_from_before_the_ranks_reconnected_is_over",
        Mutant(
            "rules",
            "            return report.meetings >= self._met[report.by].meetings",
            "            return not (report.meetings >= self._met[report.by].meetings)",
        ),
    ),
    (
        "reports_of_other_hosts_are_read_if_somebody_may_have_given_up",
        Mutant(
            "rules",
            "        return seems_late or apart > LISTEN_EVERY or now - self._began > APART",
            "        return None",
        ),
    ),
    (
        "reports_of_other_hosts_are_read_if_somebody_may_have_given_up",
        Mutant(
            "rules",
            "        return seems_late or apart > LISTEN_EVERY or now - self._began > APART",
            "        return apart > LISTEN_EVERY or now - self._began > APART",
        ),
    ),
    (
        "a_call_of_two_waits_longer_for_a_rank_that_has_left",
        Mutant(
            "rules",
            "        enough = _LOOKS_OF_TWO if why is Why.LEFT and self.peer is not None else _LOOKS",
            "        enough = _LOOKS_OF_TWO if why is Why.LEFT and self.peer is None else _LOOKS",
        ),
    ),
    (
        "a_call_of_two_waits_longer_for_a_rank_that_has_left",
        Mutant("rules", "    return earlier", "    return not (earlier)"),
    ),
    (
        "a_rank_says_since_when_it_has_not_come_back",
        Mutant(
            "rules",
            "        if self.broken is not None or wait not in (None, self.waits):",
            "        if self.broken is not None or wait in (None, self.waits):",
        ),
    ),
    (
        2,
        Mutant(
            "rules",
            "        if self.broken is not None or wait not in (None, self.waits):",
            "        if self.broken is None or wait not in (None, self.waits):",
        ),
    ),
    (
        1,
        Mutant(
            "rules",
            "        return Parting.DISCONNECT if error.is_earlier else Parting.TELL  # earlier: all ranks begin the same call again",
            "        return not (Parting.DISCONNECT if error.is_earlier else Parting.TELL)  # earlier: all ranks begin the same call again",
        ),
    ),
    (
        "a_report_outside_of_calls_counts_unless_its_rank_has_left",
        Mutant(
            "rules",
            "        if report is None or not report.is_final:",
            "        if report is None:",
        ),
    ),
    (
        "a_rank_has_finished_a_call_once_it_is_outside_of_it_or_in_a_later_one",
        Mutant(
            "rules",
            "    return last > number or (last == number and not is_inside)",
            "    return last > number or (last == number and is_inside)",
        ),
    ),
    (
        14,
        Mutant(
            "rules",
            "        return not is_shared and (self.is_awaited or not is_exception)",
            "        return not is_shared and (self.is_awaited and not is_exception)",
        ),
    ),
    (
        191,
        Mutant(
            "rules",
            "        return cause if cause is not None and cause.is_earlier else None",
            "        return cause if cause is not None else None",
        ),
    ),
    (1, Mutant("rules", "            self.at = self.number + 0.5", "            self.at = self.number + 1.5")),
    (1, Mutant("rules", "                return cause", "                return not (cause)")),
    (
        20,
        Mutant(
            "rules",
            "        return _first((None if self._left_after(one) else self.judge(one)) or self._end_of(one) for one in heard)",
            "        return _first(self._end_of(one) for one in heard)",
        ),
    ),
    (
        "a_report_from_before_the_ranks_reconnected_is_over",
        Mutant(
            "rules",
            "        if report.phase == self.phase - 1 and self._met:",
            "        if report.phase != self.phase - 1 and self._met:",
        ),
    ),
    (
        "a_call_of_two_that_the_other_had_left_is_known",
        Mutant(
            "protocol",
            "        return number > self.number or (number == self.number and other.partner is not None and is_left)",
            "        return (number == self.number and other.partner is not None and is_left)",
        ),
    ),
    (
        "a_call_of_two_that_the_other_had_left_is_known",
        Mutant(
            "protocol",
            "        number = math.ceil(other.at) - 1 if other.partner is not None else math.ceil(other.at)",
            "        number = math.ceil(other.at) - 2 if other.partner is not None else math.ceil(other.at)",
        ),
    ),
    (
        "who_is_behind_its_partner_raises_first",
        Mutant(
            "protocol",
            "    return other.partner is None or ahead > 0 or (ahead == 0 and other.partner != rank)",
            "    return other.partner is None or begun > own or (begun == own and other.partner == rank)",
        ),
    ),
    (
        "who_is_behind_its_partner_raises_first",
        Mutant(
            "protocol",
            "    return other.partner is None or ahead > 0 or (ahead == 0 and other.partner != rank)",
            "    return other.partner is None or (begun == own and other.partner != rank)",
        ),
    ),
    (
        1,
        Mutant(
            "protocol",
            "    return [rank for rank, one in told.items() if one.partner is not None and _is_past(rank, one, one.partner, told)]",
            "    return not ([rank for rank, one in told.items() if one.partner is not None and _is_past(rank, one, one.partner, told)])",
        ),
    ),
    (
        1,
        Mutant(
            "protocol",
            "        if self.peer is None or not self._met:",
            "        if self.peer is None and not self._met:",
        ),
    ),
    (
        294,
        Mutant(
            "protocol",
            "        is_left = ahead > 0 or (ahead == 0 and other.partner != self.rank)",
            "        is_left = ahead > 0 or (ahead == 0)",
        ),
    ),
    (
        "who_is_behind_its_partner_raises_first",
        Mutant(
            "protocol",
            "    return other.partner is None or ahead > 0 or (ahead == 0 and other.partner != rank)",
            "    return ahead > 0 or (ahead == 0 and other.partner != rank)",
        ),
    ),
    (
        "who_is_behind_its_partner_raises_first",
        Mutant(
            "protocol",
            "    return [rank for rank, one in told.items() if one.partner is not None and _is_past(rank, one, one.partner, told)]",
            "    return None",
        ),
    ),
    (
        "who_takes_the_others_number_raises_what_ends_that_call",
        Mutant("protocol", "        self._has_followed = True", "        pass"),
    ),
    (
        "who_is_behind_its_partner_raises_first",
        Mutant(
            "protocol",
            "    return other.partner is None or ahead > 0 or (ahead == 0 and other.partner != rank)",
            "    return other.partner is None or ahead > 0 or (ahead != 0 and other.partner != rank)",
        ),
    ),
    (
        "a_call_of_two_that_the_other_had_left_is_known",
        Mutant(
            "protocol",
            "        is_left = ahead > 0 or (ahead == 0 and other.partner != self.rank)",
            "        is_left = ahead > 0 or (other.partner != self.rank)",
        ),
    ),
    (
        "who_has_come_in_another_meeting_connects_elsewhere",
        Mutant(
            "reconnecting",
            '    return f"{phase}/{met[0].at}/{meetings}"',
            '    return not (f"{phase}/{met[0].at}/{meetings}")',
        ),
    ),
    (1, Mutant("reconnecting", "        return made", "        return None")),
    (
        "a_meeting_that_fails_leaves_the_group_broken",
        Mutant("protocol", "        return broken", "        return None"),
    ),
    (
        "a_meeting_that_fails_leaves_the_group_broken",
        Mutant(
            "reconnecting",
            "        monitor.broken = monitor.broken or broken",
            "        monitor.broken = monitor.broken and broken",
        ),
    ),
    (
        "a_meeting_that_fails_leaves_the_group_broken",
        Mutant("reconnecting", "        monitor.broken = monitor.broken or broken", "        monitor.broken = broken"),
    ),
    (
        "ranks_that_have_all_come_have_met",
        Mutant(
            "protocol",
            "            last = max(one.at for one in others.values())\n            if told.at < last:",
            "            last = max(one.at for one in others.values())\n            if told.at <= last:",
        ),
    ),
    (
        "ranks_that_have_all_come_have_met",
        Mutant("protocol", "            others |= replies.announced if replies else {}", "            pass"),
    ),
    (
        "a_call_of_two_that_the_other_had_left_is_known",
        Mutant(
            "protocol",
            "        return number > self.number or (number == self.number and other.partner is not None and is_left)",
            "        return number > self.number",
        ),
    ),
    (
        "connecting_has_a_limit",
        Mutant(
            "protocol", "        return min(max((self._ends_at - now) / 2, SHORTEST), CONNECTED)", "        return None"
        ),
    ),
    (
        "a_rank_that_has_announced_itself_is_observed",
        Mutant(
            "reconnecting",
            "        peers |= {rank: Peer(rank, who[rank]) for rank in unknown if rank in who}",
            "        peers |= {rank: Peer(rank, who[rank]) for rank in unknown if rank not in who}",
        ),
    ),
    (
        "a_rank_that_has_announced_itself_is_observed",
        Mutant(
            "reconnecting",
            "    if unknown := [rank for rank in announced if peers[rank].pid is None]:",
            "    if unknown := [*announced]:",
        ),
    ),
    ("a_meeting_is_carried_out_to_its_end", Mutant("reconnecting", "        while True:", "        while False:")),
]

EQUIVALENT = {
    Mutant(
        "reconnecting",
        "    meetings = hashlib.blake2b(repr([one.meetings for one in met]).encode(), digest_size=8).hexdigest()",
        "    meetings = hashlib.blake2b(repr([one.meetings for one in met]).encode(), digest_size=9).hexdigest()",
    ): "a longer hash names the same place",
    Mutant(
        "rules",
        "            self._over[heard.rank] = max(report.meetings, self._over.get(heard.rank, 0))",
        "            self._over[heard.rank] = max(report.meetings, self._over.get(heard.rank, 1))",
    ): "meetings are counted from 1 on",
    Mutant(
        "rules", "        if now < self._warn_at:", "        if now <= self._warn_at:"
    ): "a wait is logged at its time, or at the next look",
    Mutant(
        "rules", "        if report.peer is None or self._partner is None:", "        if self._partner is None:"
    ): "no report about a call of all ranks has the number of a call of two, unless it is final",
    Mutant("protocol", "        self._meetings += 1", "        self._meetings += 2"): "the numbers are only compared",
    Mutant(
        "protocol",
        "            replies = yield Step(Do.ASK, ranks=[rank for rank, one in others.items() if one.at < told.at])",
        "            replies = yield Step(Do.ASK, ranks=[rank for rank, one in others.items() if one.at <= told.at])",
    ): "who has come already is asked again",
}

UNNOTICED: dict[Mutant, str] = {}
