-- The queue of the claims that wait. Scripts include this behind what they do if no claim waits, as every function here is made anew in each
-- run that gets so far.

-- How many waiters that are gone one script removes at most; the next script goes on with those that are left.
local budget = 128

-- In a cluster, the run id of this node, with which the channels of clients end that are connected to it.
local HERE = #KEYS > 4 and ARGV[#ARGV]

-- The number of clients that received it. One that is connected to another node of a cluster counts: the nodes pass the message on, and
-- the client asks again as soon as that connection has ended.
local function tell(client, ...)
    local received = redis.call('PUBLISH', CHANNEL .. client, table.concat({ ... }, ' '))
    return HERE and string.sub(client, -#HERE) ~= HERE and 1 or received
end

-- The owner that has waited longest, and its entry.
local function oldest()
    local owner = redis.call('ZRANGE', ORDER, 0, 0)[1]
    return owner, owner and redis.call('HGET', WAITERS, owner)
end

-- Takes the owner out of the queue.
local function leave(owner)
    redis.call('ZREM', ORDER, owner)
    redis.call('HDEL', WAITERS, owner)
end

local function drop(owner)
    leave(owner)
    budget = budget - 1
end

-- On a full server Redis refuses a script's first write if it needs memory, and no later one. This write needs none and changes nothing. So
-- a claim in the queue can stay there, and be granted the lock.
local function write_although_full()
    redis.call('HDEL', WAITERS, '')
end

-- Puts the owner at the end of the queue, or keeps it where it is for another life.
local function enqueue(owner, queued, ttl, life, sent, client, info, wanted)
    local entry = table.concat({ wanted, text(now + life), text(ttl), sent, text(life), client, info }, ' ')
    redis.call('HSET', WAITERS, owner, entry)
    if not queued then
        -- Numbers follow the clock, and rise where the clock was set back.
        local last = redis.call('ZRANGE', ORDER, -1, -1, 'WITHSCORES')[2]
        redis.call('ZADD', ORDER, text(math.max(now_us, (tonumber(last) or 0) + 1)), owner)
    end
    -- Both end when the last entry does.
    local kept = redis.call('PTTL', WAITERS)
    if not queued or kept < life then
        kept = math.max(kept, life)
        redis.call('PEXPIRE', ORDER, kept)
        redis.call('PEXPIRE', WAITERS, kept)
    end
end

local function read_entry(entry)
    local wanted, stop, ttl, sent, life, client, info =
        string.match(entry or '', '^(%d+) (%d+) (%d+) (%d+) (%d+) (%S+) (.*)$')
    return tonumber(stop), tonumber(ttl), sent, tonumber(life), client, info, wanted
end

-- A waiter that has missed two refreshes is taken for dead.
local function is_there(stop, ttl)
    return stop and (stop - now) * 3 >= ttl
end

-- Removes entries whose time is over, wherever in the queue they are: looks at a few by chance, and goes on while many of
-- those are. As every newcomer does so, no more than about half of the queue is over.
local function sweep()
    repeat
        local some = redis.call('HRANDFIELD', WAITERS, 4, 'WITHVALUES')
        local over = 0
        for at = 1, #some, 2 do
            local stop = read_entry(some[at + 1])
            if not stop or stop <= now then
                drop(some[at])
                over = over + 1
            end
        end
    until over < 2 or budget <= 0
end

-- Tells the first in line when the lock ends, which may be sooner than its last answer said. One that does not hear of it asks at its next
-- refresh.
local function tell_first(lease)
    local owner, entry = oldest()
    local _, _, _, _, client = read_entry(entry)
    if client then
        tell(client, 'first', owner, text(lease))
    end
end

-- Before: the lock is free. Gives it to the one who has waited longest and can hear of it, and returns 'granted'. If that
-- is `me`, or there is nobody, leaves it free and returns 'free', and whether `me` is in the queue. Returns 'more' if it
-- has found nobody yet but has removed all the waiters that one script may.
local function grant_next(me)
    local token, tokens
    while budget > 0 do
        local owner, entry = oldest()
        if not owner or owner == me then
            return 'free', owner
        end
        local stop, ttl, sent, life, client, info, wanted = read_entry(entry)
        if is_there(stop, ttl) then
            if not token then
                write_although_full()
                token, tokens = draw(wanted)
            end
            leave(owner)
            -- No longer than was asked for, should the clock have been set back.
            local left = math.min(stop - now, life)
            hold(owner, token, left, client, info)
            if tell(client, 'granted', owner, token, sent, text(life), math.min(tokens, wanted)) > 0 then
                tell_first(left)
                return 'granted'
            end
            redis.call('DEL', LOCK)
            budget = budget - 1
        else
            drop(owner)
        end
    end
    return 'more'
end

-- Before: the lock is free, which does not change if something is wrong with the other keys. Returns 1 if there is more to be
-- done, or else 0.
local function serve()
    local done, found = pcall(grant_next)
    return done and found == 'more' and 1 or 0
end

-- If the claim waits, `ahead` says for how many ms the first in line keeps its place, 0 if that is the claim itself.
local function busy(value, life, ahead)
    return { 'busy', stamp, redis.call('PTTL', LOCK), value, life, ahead or -1 }
end

-- Makes the owner the holder if it is already, or if the lock is free and nobody comes before it. Returns the answer, or
-- nil and the value of the lock if somebody else holds it. Of the block of an owner that holds it already, only the last token is stored.
local function take(owner, life, client, info, wanted)
    local value = held()
    if owner_of(value) == owner then
        if redis.call('PTTL', LOCK) < life then
            redis.call('PEXPIRE', LOCK, life)
        end
        return { 'granted', stamp, token_of(value), life }
    end
    if value then
        return nil, value
    end
    local found, queued = grant_next(owner)
    if found == 'granted' then
        return nil, held()
    end
    if found == 'more' then
        return { 'again', stamp }
    end
    local token, tokens = draw(wanted)
    hold(owner, token, life, client, info)
    if queued then
        leave(owner)
    end
    return { 'granted', stamp, token, life, tokens }
end
