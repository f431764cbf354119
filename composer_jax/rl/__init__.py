"""Reinforcement learning: rollouts, trajectories, objective, learner."""
