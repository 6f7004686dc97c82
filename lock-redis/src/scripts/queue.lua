-- What the scripts have in common beyond that: what is needed only if somebody waits, or somebody else holds the lock. It
-- comes after what a script does first, as every function here is made anew in each run of a script that gets so far.

-- How many clients heard it.
local function tell(client, ...)
    return redis.call('PUBLISH', CHANNEL .. client, table.concat({ ... }, ' '))
end

-- The owner that has waited longest, and its entry.
local function oldest()
    local ends = redis.call('HMGET', QUEUE, 'head', 'tail')
    local head, tail = tonumber(ends[1] or 1), tonumber(ends[2] or 0)
    for number = head, tail do
        local owner = redis.call('HGET', QUEUE, text(number))
        if owner then
            if number > head then
                redis.call('HSET', QUEUE, 'head', text(number))
            end
            return owner, redis.call('HGET', QUEUE, owner)
        end
    end
end

-- Takes the owner out of the queue.
local function leave(owner)
    local entry = redis.call('HGET', QUEUE, owner)
    if entry then
        redis.call('HDEL', QUEUE, owner, string.match(entry, '^%d+ (%d+)'))
        -- Nothing left but the two ends.
        if redis.call('HLEN', QUEUE) <= 2 then
            redis.call('DEL', QUEUE)
        end
    end
end

-- Puts the owner at the end of the queue, or keeps it where it is for another life.
local function enqueue(owner, ttl, life, sent, client, info)
    local entry = redis.call('HGET', QUEUE, owner)
    local number = entry and string.match(entry, '^%d+ (%d+)')
    if not number then
        number = text(redis.call('HINCRBY', QUEUE, 'tail', 1))
        redis.call('HSETNX', QUEUE, 'head', number)
        redis.call('HSET', QUEUE, number, owner)
    end
    entry = table.concat({ FORMAT, number, text(now + life), text(ttl), sent, text(life), client, info }, ' ')
    redis.call('HSET', QUEUE, owner, entry)
    if redis.call('PTTL', QUEUE) < life then
        redis.call('PEXPIRE', QUEUE, life)
    end
end

local function read_entry(entry)
    local stop, ttl, sent, life, client, info =
        string.match(entry, '^%d+ %d+ (%d+) (%d+) (%d+) (%d+) (%S+) (.*)$')
    return tonumber(stop), tonumber(ttl), sent, life, client, info
end

local function has_missed_a_refresh(_, entry)
    local stop, ttl = read_entry(entry)
    return not stop or (stop - now) * 3 < ttl * 2
end

-- Tells who is the first in line now, and how long the lease has to go that it waits for.
local function tell_first(lease)
    local owner, entry = oldest()
    while owner do
        local _, _, _, _, client = read_entry(entry)
        if client and tell(client, 'first', owner, text(lease)) > 0 then
            return
        end
        leave(owner)
        owner, entry = oldest()
    end
end

-- Before: the lock is free. Gives it to the one who has waited longest and can hear of it. But if that is `me`, or there
-- is nobody, leaves it free and returns true, and whether `me` is in the queue.
local function grant_next(me)
    local owner, entry = oldest()
    local token
    while owner and owner ~= me do
        local stop, ttl, sent, life, client, info = read_entry(entry)
        -- Whoever has missed two refreshes is not there any more.
        if stop and (stop - now) * 3 >= ttl then
            token = token or draw()
            leave(owner)
            hold(owner, token, stop - now, client, info)
            if tell(client, 'granted', owner, token, sent, life) > 0 then
                tell_first(stop - now)
                return false
            end
            redis.call('DEL', LOCK)
        else
            leave(owner)
        end
        owner, entry = oldest()
    end
    return true, owner ~= nil
end

-- Ends what the owner has on the server, and gives on what became free. True if it held the lock.
local function let_go(owner)
    local value = redis.call('GET', LOCK)
    local released = owner_of(value) == owner
    if released then
        redis.call('DEL', LOCK)
    end
    -- Whatever is wrong with the other keys, the release has been carried out.
    pcall(function()
        local first = oldest()
        leave(owner)
        if released or not value then
            grant_next()
        elseif first == owner then
            tell_first(redis.call('PTTL', LOCK))
        end
    end)
    return released
end

-- Makes the owner the holder if it is already, or if the lock is free and nobody comes before it. The answer, or nil and
-- the value of the lock if somebody else holds it.
local function take(owner, life, client, info)
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
    local free, queued = grant_next(owner)
    if not free then
        return nil, held()
    end
    local token = draw()
    hold(owner, token, life, client, info)
    if queued then
        leave(owner)
        tell_first(life)
    end
    return { 'granted', stamp, token, life }
end

local function busy(value, life, first)
    return { 'busy', stamp, redis.call('PTTL', LOCK), value, life, first and 1 or 0 }
end
