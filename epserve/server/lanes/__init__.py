"""Calls of layers through words and rows of shared memory (`protocol/lane_words.py`): the door, the lane, and the thread
that serves all lanes of this process."""
