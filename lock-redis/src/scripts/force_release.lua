local value = held()
if not value then
    return { 'free', stamp, serve() }
end
local lease = redis.call('PTTL', LOCK)
redis.call('DEL', LOCK)
-- A node of several servers has the number of the client's attempt behind a #.
local client = string.match(value, '^%d+ %S+ %d+ %d+ ([^ #]+)')
if client and string.sub(owner_of(value), 1, #RESERVED) ~= RESERVED then
    tell(client, 'taken', owner_of(value))
end
return { 'released', stamp, serve(), lease, value }
