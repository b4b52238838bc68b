"""What a process shares with the rest of the machine: locks across forks, files of others, other programs."""
