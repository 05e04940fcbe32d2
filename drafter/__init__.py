"""What a DSpark drafter is: configuration, checkpoint layouts, reference model."""
