"""What an image flows through: vit.py is the map, modules.py its parts."""
