-- Keeps a place in the queue while the slot of the name is moved: writes only to keys that are there, so either node can run it.
-- KEYS: 1 the order of the waiters, 2 what is known of each.
-- ARGV: 3 the owner, 4 ttl in ms, 5 server time in ms when its place must have ended.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local life = math.min(tonumber(ARGV[4]), tonumber(ARGV[5]) - now)
local entry = redis.call('HGET', KEYS[2], ARGV[3])
local format, stop, rest = string.match(entry or '', '^(%d+) (%d+) (.*)$')
if not stop or redis.call('EXISTS', KEYS[1]) == 0 or tonumber(stop) >= now + life then
    return { 0 }
end
redis.call('HSET', KEYS[2], ARGV[3], string.format('%s %.0f %s', format, now + life, rest))
for at = 1, 2 do
    if redis.call('PTTL', KEYS[at]) < life then
        redis.call('PEXPIRE', KEYS[at], life)
    end
end
return { 1 }
