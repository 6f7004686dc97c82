-- ARGV: 4 ttl in ms, 5 server time in ms when the claim must have ended, 6 send stamp, 7 client, 8 what to keep of the
-- holder, 9 '0' not to wait, 10 how many tokens the client wants, 11 the mode: 'x' (exclusive), 's' (shared), or 'p' and how many may hold.
local life = life_of(ARGV[4], ARGV[5])
if not life then
    return { 'late', stamp }
end
if ARGV[11] == 'x' and redis.call('EXISTS', LOCK, HOLDERS, ORDER) == 0 then
    local token, tokens = draw(ARGV[10])
    hold(OWNER, token, life, ARGV[7], ARGV[8])
    return { 'granted', stamp, token, life, tokens }
end
-- What follows is needed only if a claim holds the name or waits for it, or others may hold it, too.
-- include shares.lua
-- include queue.lua
local waits = ARGV[9] ~= '0'
local queued = waits and redis.call('ZSCORE', ORDER, OWNER)
if queued then
    write_although_full()
end
local answer, value, lease = take(OWNER, life, ARGV[7], ARGV[8], ARGV[10], ARGV[11])
if answer then
    return answer
end
if not waits then
    return busy(value, lease, life)
end
enqueue(OWNER, queued, tonumber(ARGV[4]), life, ARGV[6], ARGV[7], ARGV[8], ARGV[10], ARGV[11])
local first, entry = oldest()
if queued or first ~= OWNER then
    sweep()
end
-- If the sweep has removed the first in line, the next one that asks finds out who is it now.
local ahead = 0
if first ~= OWNER then
    ahead = math.max(1, (read_entry(entry) or now) - now)
end
return busy(value, lease, life, ahead)
