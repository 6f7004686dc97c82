local waits = ARGV[9] ~= '0'
local queued = waits and redis.call('ZSCORE', ORDER, OWNER)
if queued then
    write_although_full()
end
local answer, value = take(OWNER, life, ARGV[7], ARGV[8], ARGV[10])
if answer then
    return answer
end
if not waits then
    return busy(value, life)
end
enqueue(OWNER, queued, tonumber(ARGV[4]), life, ARGV[6], ARGV[7], ARGV[8], ARGV[10])
local first, entry = oldest()
if queued or first ~= OWNER then
    sweep()
end
-- If the sweep has removed the first in line, the next one that asks finds out who is it now.
local ahead = 0
if first ~= OWNER then
    ahead = math.max(1, (read_entry(entry) or now) - now)
end
return busy(value, life, ahead)
