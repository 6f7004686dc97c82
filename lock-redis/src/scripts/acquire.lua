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
-- Nobody else looks after the expiry: should the first in line be gone, this is where it is found out.
if first ~= OWNER and not is_there(read_entry(entry)) then
    tell_first(redis.call('PTTL', LOCK))
    first, entry = oldest()
end
-- If it is not known who is the first in line, each claim that asks takes itself for it.
local ahead = 0
if first ~= OWNER and budget > 0 then
    ahead = math.max(1, (read_entry(entry) or now) - now)
end
return busy(value, life, ahead)
