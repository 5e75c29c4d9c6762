"""What does a record say?  Files of records, in any format, become ``Sample``s."""
