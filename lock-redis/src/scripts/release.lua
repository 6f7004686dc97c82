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
local ended = {}
if any and value then
    ended = { { redis.call('PTTL', LOCK), value } }
end
if released and keep == '0' or not value then
    -- If there is nothing to delete, a replica refuses this all the same: what it lacks, its primary may have.
    redis.call('DEL', LOCK)
end
local reserved = released and keep ~= '0'
local left
if not released and not any and redis.call('EXISTS', HOLDERS) == 1 then
    left = (tonumber(redis.call('ZSCORE', HOLDERS, OWNER)) or now) - now
    redis.call('ZREM', HOLDERS, OWNER)
    redis.call('HDEL', RECORDS, OWNER)
    released = left > 0
end
if not any and redis.call('EXISTS', ORDER) == 0 then
    return { released and 'released' or 'lost', stamp, 0 }
end
-- include shares.lua
-- include queue.lua
if reserved then
    -- Whatever is wrong with the other keys, the hold has ended.
    pcall(tell_first, tonumber(keep))
    return { 'released', stamp, 0 }
end
if any then
    local holders = redis.call('ZRANGE', HOLDERS, 0, -1)
    for _, owner in ipairs(holders) do
        local left, record = shared_by(owner)
        if left > 0 and record then
            ended[#ended + 1] = { left, record }
        end
    end
    redis.call('DEL', HOLDERS, RECORDS)
end
for _, hold in ipairs(ended) do
    local owner = owner_of(hold[2])
    -- A node of several servers has the number of the client's attempt behind a #.
    local client = string.match(hold[2], '^%S+ %S+ %d+ %d+ ([^ #]+)')
    if client and string.sub(owner, 1, #RESERVED) ~= RESERVED then
        tell(client, 'taken', owner, token_of(hold[2]))
    end
end
local more = 0
-- Whatever is wrong with the other keys, the release has been carried out.
pcall(function()
    leave(OWNER)
    more = serve(left)
end)
local answer = { (released or #ended > 0) and 'released' or any and 'free' or 'lost', stamp, more }
for _, hold in ipairs(ended) do
    answer[#answer + 1] = hold[1]
    answer[#answer + 1] = hold[2]
end
return answer
