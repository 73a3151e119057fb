"""What limits a program, whether the runtime helps it, and what takes its workers' memory."""
