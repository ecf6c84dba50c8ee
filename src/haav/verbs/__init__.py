"""What `haav VERB` does: functions whose annotations are their flags and help. They call, and print; no logic."""
