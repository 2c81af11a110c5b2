"""Measuring: named shapes, clocks, a gate that holds every kernel against the oracle before it is timed, peers, tuning.

Behind ``replayssm bench``; nothing here prints. Units: seconds and bytes inside, microseconds and GB/s in rows.
"""
