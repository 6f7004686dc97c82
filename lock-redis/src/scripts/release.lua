-- ARGV: 3 the owner, '*' for any, or '-' for none, which only serves the next waiter, 4 for how many ms the name stays reserved from now on,
-- '0' to free it, 5 server time in ms when a release that leaves a reservation is too late.
local any, keep = OWNER == '*', ARGV[4]
-- Stands before the owner of a lock that was released and whose name is reserved, so that no owner matches.
local RESERVED = 'reserved:'
local value
if any or keep ~= '0' then
    value = held()
else
    value = redis.call('GET', LOCK)
end
local released = value and (any or owner_of(value) == OWNER)
if released and keep ~= '0' then
    if now > tonumber(ARGV[5]) then
        return { 'late', stamp }
    end
    redis.call('PEXPIRE', LOCK, keep)
    -- After a write that needs no memory, so that a full server does not refuse this one.
    redis.call('SET', LOCK, (string.gsub(value, ' ', ' ' .. RESERVED, 1)), 'PX', keep)
end
local lease = any and redis.call('PTTL', LOCK) or nil
if released and keep == '0' or not value then
    -- If there is nothing to delete, a replica refuses this all the same: what it lacks, its primary may have.
    redis.call('DEL', LOCK)
end
if not any and redis.call('EXISTS', ORDER) == 0 then
    return { released and 'released' or 'lost', stamp, 0 }
end
-- include queue.lua
if released and keep ~= '0' then
    -- Whatever is wrong with the other keys, the hold has ended.
    pcall(tell_first, tonumber(keep))
    return { 'released', stamp, 0 }
end
-- A node of several servers has the number of the client's attempt behind a #.
local client = any and released and string.match(value, '^%d+ %S+ %d+ %d+ ([^ #]+)')
if client and string.sub(owner_of(value), 1, #RESERVED) ~= RESERVED then
    tell(client, 'taken', owner_of(value), token_of(value))
end
local more = 0
-- Whatever is wrong with the other keys, the release has been carried out.
pcall(function()
    leave(OWNER)
    if released or not value then
        more = serve()
    end
end)
return { released and 'released' or any and 'free' or 'lost', stamp, more, lease, value or nil }
