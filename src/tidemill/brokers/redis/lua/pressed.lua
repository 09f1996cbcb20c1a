Carrier.Room.pressed = true -- the server is out of memory: see room.lua
