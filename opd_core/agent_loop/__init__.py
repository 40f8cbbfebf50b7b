"""The life of a group: sampled, judged, filtered, scored; then it trains or its end is counted.

``prompts``        the order in which prompts are asked, and what comes back to it
``loop``           :class:`AgentLoop`: one group from its prompt to its final status
``judging``        judges run in a process of their own
``judges``         judges for the shipped tasks
``replay_buffer``  finished groups that may train
``collect``        one train step's worth of groups, and what became of the others
``evaluation``     held-out accuracy, without any teacher
"""
